"""Which API keys are good, and for whom."""

from __future__ import annotations

import sys

from gateway.settings import GatewaySettings
from gateway.state_directory import StateDirectory


def keys_in_force(settings: GatewaySettings, state: StateDirectory) -> dict[str, str]:
    """Key → tenant: those given, else the state's own, which is printed when this call made it."""
    if settings.api_keys:
        return settings.api_keys
    keys, is_fresh = state.generated_key()
    place = state.path / "api_key"
    if is_fresh:
        [(key, tenant)] = keys.items()
        sys.stdout.write(f"cellgate api key {key} (tenant {tenant}; kept in {place})\n")
        sys.stdout.flush()
    else:
        sys.stderr.write(f"cellgate: the API key is in {place}\n")
    return keys
