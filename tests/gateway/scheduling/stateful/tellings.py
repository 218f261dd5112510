"""Which tellings of answers the journal knew of whenever a gateway read it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gateway.store.records import Stored
from gateway.store.writer import LAZY_S
from tests.gateway.scheduling.stateful.process import StateDisk

# A telling waits for company, then for the disk: its longest delay, and after a failure the longest pause.
SLOWEST_S = LAZY_S + 3.0 + 1.0 + 0.5


@dataclass(frozen=True)
class _End:
    """moment: of a gateway's life. failed_at: when the disk of the journal last failed before it."""

    moment: float
    failed_at: float


class Tellings:
    """By life of a gateway."""

    def __init__(self) -> None:
        self._untold: dict[int, frozenset[str]] = {}
        self._ends: dict[int, _End] = {}

    def note_reading(self, life: int, stored: Stored) -> None:
        untold = (row.request_id for row in stored.commands if row.finished is not None and row.told_moment is None)
        self._untold[life] = frozenset(untold)

    def note_end(self, life: int, moment: float, disk: StateDisk) -> None:
        self._ends[life] = _End(moment, disk.failed_at)

    def was_forgotten(self, request_id: str, told_in: int, lives: Iterable[int]) -> bool:
        """Whether one of those gateways, later than the one that told it, did not know that the answer was told."""
        return any(life > told_in and request_id in self._untold.get(life, ()) for life in lives)

    def must_be_known(self, told_at: float, told_in: int) -> bool:
        """Of a telling in that life: that life went on for long enough for it to be on record."""
        end = self._ends.get(told_in)
        return end is not None and max(told_at, end.failed_at) + SLOWEST_S < end.moment

    def is_known(self, request_id: str, told_in: int) -> bool:
        """To the first gateway after that life."""
        after = min((life for life in self._untold if life > told_in), default=None)
        return after is None or request_id not in self._untold[after]
