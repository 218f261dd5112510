"""Unix time that never jumps while this process runs, whoever sets the machine's clock."""

from __future__ import annotations

import time

_START_S = time.time() - time.monotonic()


def steady_time() -> float:
    """Seconds."""
    return _START_S + time.monotonic()
