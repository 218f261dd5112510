"""Rectangular parts of a tensor, and copying from one to another where they overlap."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod


@dataclass(frozen=True)
class Region:
    """start: the first element on every axis, counted in the whole tensor; shape: how many there are."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def cut(cls, shape: tuple[int, ...], axis: int | None, offset: int) -> Region:
        """The part that starts at `offset` on `axis` and is whole on all other axes; None: the whole."""
        return cls(tuple(offset if at == axis else 0 for at in range(len(shape))), shape)

    def overlaps(self, other: Region) -> bool:
        """Whether both have an element of the tensor."""
        return all(
            max(start, begin) < min(start + size, begin + length)
            for start, size, begin, length in zip(self.start, self.shape, other.start, other.shape, strict=True)
        )

    def position(self, element: tuple[int, ...]) -> int:
        """Of an element of the whole tensor among those of this region, in C order."""
        position = 0
        for at, first, size in zip(element, self.start, self.shape, strict=True):
            position = position * size + at - first
        return position


def copy_overlap(source: memoryview, held: Region, target: memoryview, wanted: Region, item_bytes: int) -> None:
    """Copy the elements that both regions of one tensor have; the memory of each is C-ordered over its own shape."""
    low = tuple(map(max, held.start, wanted.start))
    high = tuple(
        min(start + size, other + length)
        for start, size, other, length in zip(held.start, held.shape, wanted.start, wanted.shape, strict=True)
    )
    sizes = [end - begin for begin, end in zip(low, high, strict=True)]
    if any(size <= 0 for size in sizes):
        return
    # Behind `split` the overlap is whole in both, so that from there on the elements are one run in both.
    split = len(sizes) - 1
    while split > 0 and sizes[split] == held.shape[split] == wanted.shape[split]:
        split -= 1
    run = prod(sizes[split:]) * item_bytes
    for outer in product(*(range(low[at], high[at]) for at in range(split))):
        element = (*outer, *low[split:])
        begin = held.position(element) * item_bytes
        end = wanted.position(element) * item_bytes
        target[end : end + run] = source[begin : begin + run]
