"""Tensors that lie side by side both in a checkpoint as read and in a slot: checked and copied as one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Placed:
    """A tensor: its key, where in memory its values are (begin and end, in bytes), and where in the slot's flat
    buffer they belong (in elements)."""

    key: str
    begin: int
    end: int
    target: int


@dataclass(frozen=True)
class Span:
    """One or more tensors that lie side by side: their keys; begin, end and target as of a `Placed`."""

    keys: tuple[str, ...]
    begin: int
    end: int
    target: int


def find_spans(placed: Iterable[Placed], item_bytes: int) -> list[Span]:
    """All tensors that have elements, in as few spans as they lie in."""
    groups: list[list[Placed]] = []
    for tensor in sorted(placed, key=lambda tensor: tensor.target):
        if tensor.begin == tensor.end:
            continue
        last = groups[-1][-1] if groups else None
        if last and tensor.begin == last.end and tensor.target == last.target + (last.end - last.begin) // item_bytes:
            groups[-1].append(tensor)
        else:
            groups.append([tensor])
    return [Span(tuple(one.key for one in group), group[0].begin, group[-1].end, group[0].target) for group in groups]


def copy_bits(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> None:
    """`copy_` between contiguous tensors of one dtype: as bytes it is a plain copy of memory, which is faster."""
    assert target.dtype == source.dtype
    target.view(torch.uint8).copy_(source.view(torch.uint8), non_blocking=non_blocking)


def is_finite(values: torch.Tensor) -> bool:
    """Neither NaN nor infinite: of the smallest and the largest, which are NaN when any is. One pass without a
    temporary, tens of times as fast as `isfinite`."""
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low)) and bool(torch.isfinite(high))
