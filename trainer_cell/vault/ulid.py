"""Ids that sort by the time they were made: 48 bits of milliseconds, 80 of chance, in Crockford's base 32."""

from __future__ import annotations

import secrets
import threading
import time

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_LENGTH = 26
ULID_PATTERN = rf"[{_ALPHABET}]{{{_LENGTH}}}"


class _Sequence:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def next(self, floor: int) -> int:
        """Later than all before and than `floor`, even if the clock went back; the step is drawn, not one, because
        another process may be counting on from the same floor."""
        value = (time.time_ns() // 1_000_000 << 80) | secrets.randbits(80)
        with self._lock:
            floor = max(floor, self._last)
            self._last = value if value > floor else floor + 1 + secrets.randbits(72)
            return self._last


_sequence = _Sequence()


def new_ulid(after: str | None = None) -> str:
    """An id that sorts behind every one this process made before, and behind `after`."""
    value = _sequence.next(_value(after) if after else 0)
    return "".join(_ALPHABET[value >> shift & 31] for shift in range(5 * (_LENGTH - 1), -1, -5))


def _value(ulid: str) -> int:
    value = 0
    for character in ulid:
        value = value << 5 | _ALPHABET.index(character)
    return value
