"""Who asks: the key of a request gives its tenant, before anything of the body is read."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.errors import Unauthorized
from gateway.http.limits import refuse

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/api/v1/healthz"})
_BEARER = b"bearer "


class Keyring:
    """API keys and their tenants. Looking one up takes the same time whatever is presented."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._tenants = [(_digest(key.encode()), tenant) for key, tenant in keys.items()]

    def tenant(self, presented: bytes) -> str | None:
        digest = _digest(presented)
        found: str | None = None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _presented_key(scope: Scope) -> bytes | None:
    """`X-API-Key`, which the SDK sends; or `Authorization: Bearer`, which other clients find easier."""
    headers = dict(scope["headers"])
    if b"x-api-key" in headers:
        return bytes(headers[b"x-api-key"])
    authorization = bytes(headers.get(b"authorization", b""))
    return authorization[len(_BEARER) :].strip() if authorization.lower().startswith(_BEARER) else None


class TenantGate:
    """Lets a request pass with its tenant in `request.state.tenant`, or answers 401; only health is open to all."""

    def __init__(self, app: ASGIApp, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        key = _presented_key(scope)
        tenant = None if key is None else self._keyring.tenant(key)
        if tenant is None:
            reason = "no API key: send it as X-API-Key" if key is None else "unknown API key"
            await refuse(Unauthorized(reason), scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)
