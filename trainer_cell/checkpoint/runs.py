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
class Run:
    """values: 1-D, of one or more tensors; target: where in the slot's flat buffer they belong."""

    values: torch.Tensor
    target: int

    def copy_to(self, flat: torch.Tensor) -> None:
        flat[self.target : self.target + self.values.numel()].copy_(self.values)


def find_runs(memory: memoryview, placed: Iterable[Placed], dtype: torch.dtype) -> list[Run]:
    """All tensors that have elements, in as few runs as they lie in; the values are views of `memory`."""
    spans: list[tuple[int, int, int]] = []
    for tensor in sorted(placed, key=lambda tensor: tensor.target):
        if tensor.begin == tensor.end:
            continue
        if spans:
            begin, end, target = spans[-1]
            if tensor.begin == end and tensor.target == target + (end - begin) // dtype.itemsize:
                spans[-1] = (begin, tensor.end, target)
                continue
        spans.append((tensor.begin, tensor.end, tensor.target))
    return [Run(torch.frombuffer(memory[begin:end], dtype=dtype), target) for begin, end, target in spans]


def is_finite(values: torch.Tensor) -> bool:
    """Neither NaN nor infinite: of the smallest and the largest, which are NaN when any is. One pass without a
    temporary, tens of times as fast as `isfinite`."""
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low)) and bool(torch.isfinite(high))


def not_finite(memory: memoryview, placed: Iterable[Placed], dtype: torch.dtype) -> list[str]:
    """The keys of tensors that hold NaN or infinity."""
    runs = ((tensor.key, run) for tensor in placed for run in find_runs(memory, [tensor], dtype))
    return [key for key, run in runs if not is_finite(run.values)]
