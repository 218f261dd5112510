"""A thing and its baseline, measured in turns on the same machine in the same minute; and the table of such pairs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Pairs:
    """Times of one thing and of its baseline, in seconds, pair by pair."""

    ours: tuple[float, ...]
    base: tuple[float, ...]

    @property
    def of_minima(self) -> float:
        """What the machine allows when nothing else disturbs: the least noisy figure."""
        return min(self.ours) / min(self.base)

    @property
    def median(self) -> float:
        """Of the ratios within each pair."""
        return median(ours / base for ours, base in zip(self.ours, self.base, strict=True))


def timed(act: Callable[[], object]) -> float:
    """Seconds."""
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def in_turns(pairs: int, ours: Callable[[], float], base: Callable[[], float]) -> Pairs:
    """Each is called `pairs` times and returns its seconds; the first round is not counted."""
    measured = [(ours(), base()) for _ in range(pairs + 1)][1:]
    return Pairs(tuple(pair[0] for pair in measured), tuple(pair[1] for pair in measured))


@dataclass(frozen=True)
class Row:
    """One line of the table. reach: the ratio that is asked for, in words."""

    what: str
    case: str
    pairs: Pairs
    reach: str = ""


_HEAD = ("what", "case", "ours ms", "baseline ms", "ratio", "(median)", "reach", "pairs")


def table(title: str, rows: Iterable[Row]) -> str:
    """Times are minimum / median; `ratio` is that of the minima, `(median)` the median of the pairs' ratios."""
    lines = [_HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(_HEAD))]
    texts = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([title, texts[0], "-" * max(map(len, texts)), *texts[1:], ""])


def _cells(row: Row) -> tuple[str, ...]:
    pairs = row.pairs
    return (
        row.what, row.case, _times(pairs.ours), _times(pairs.base), f"{pairs.of_minima:.2f}", f"({pairs.median:.2f})",
        row.reach, str(len(pairs.ours)),
    )  # fmt: skip


def _times(seconds: tuple[float, ...]) -> str:
    return f"{min(seconds) * 1e3:.2f} / {median(seconds) * 1e3:.2f}"
