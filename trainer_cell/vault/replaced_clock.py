"""How long a version has been replaced, told by a clock that only goes forward.

When a version is seen replaced for the first time, the time its successor's manifest gives is believed; but not before
the round before, in which it was not yet. From then on the steady clock counts, so a wall clock that is set back or
ahead neither keeps replaced versions for ever nor takes them early.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class ReplacedClock:
    def __init__(self, steady: Callable[[], float] = time.monotonic) -> None:
        self._steady = steady
        self._since: dict[str, float] = {}
        self._seen: set[str] = set()
        self._round_began: float | None = None
        self._last_round_began: float | None = None

    def begin_round(self) -> None:
        self._seen = set()
        self._round_began = self._steady()

    def end_round(self) -> None:
        """All models have been looked at: versions that were not seen are gone."""
        self._since = {version: since for version, since in self._since.items() if version in self._seen}
        self._last_round_began = self._round_began

    def replaced_for_s(self, version: str, told_s: float) -> float:
        """In seconds, 0 or more. told_s: by the wall clock, for a version that is seen replaced for the first time."""
        now = self._steady()
        self._seen.add(version)
        if version not in self._since:
            longest_s = now - self._last_round_began if self._last_round_began is not None else told_s
            self._since[version] = now - max(0.0, min(told_s, longest_s))
        return now - self._since[version]
