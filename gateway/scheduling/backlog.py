"""How much may wait: a limit per tenant on accepted commands without an answer."""

from __future__ import annotations

from collections import Counter

from gateway.scheduling.errors import QueueFull

MAX_COMMANDS = 20_000
MAX_BYTES = 2 << 30


class Backlog:
    def __init__(self, max_commands: int = MAX_COMMANDS, max_bytes: int = MAX_BYTES) -> None:
        self._max_commands = max_commands
        self._max_bytes = max_bytes
        self._commands: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def check(self, tenant: str) -> None:
        """Raises `QueueFull` when the tenant has too much waiting."""
        if self._commands[tenant] >= self._max_commands or self._bytes[tenant] >= self._max_bytes:
            raise QueueFull("too much is waiting already; send again when some of it is done")

    def enter(self, tenant: str, payload_bytes: int) -> None:
        self._commands[tenant] += 1
        self._bytes[tenant] += payload_bytes

    def leave(self, tenant: str, payload_bytes: int) -> None:
        self._commands[tenant] -= 1
        self._bytes[tenant] -= payload_bytes
