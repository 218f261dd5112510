"""Copies of slots in memory that is kept from save to save: what follows in training does not reach them.

A capture is the image of this rank's file, header and all, so that writing it is writing one run of bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_cell.checkpoint.plan import SavePlan, Stretch
from trainer_cell.checkpoint.runs import copy_bits
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.training.slots import Slot
from trainer_cell.vault.shard_layout import PAGE_BYTES, image_memory, whole_pages

_TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
# What infinity is as an integer of its width; NaN is beyond it.
_INFINITY = {"F32": 0x7F800000, "BF16": 0x7F80}
_INTEGERS = {"F32": (np.int32, np.uint32), "BF16": (np.int16, np.uint16)}


class SaveBuffer:
    """Page-aligned CPU memory (pinned, for a GPU to copy into). `size` bytes, a multiple of the page."""

    def __init__(self, num_bytes: int, pin: bool) -> None:
        if pin:
            whole = torch.empty(whole_pages(num_bytes) + PAGE_BYTES, dtype=torch.uint8, pin_memory=True)
            begin = -whole.data_ptr() % PAGE_BYTES
            self._bytes = whole[begin : begin + whole_pages(num_bytes)]
        else:
            self._bytes = torch.frombuffer(image_memory(num_bytes), dtype=torch.uint8)
        # So that its pages are there before the first capture: fresh ones cost several times the copy.
        self._bytes.zero_()
        self.size: int = self._bytes.numel()

    def capture(self, plan: SavePlan, rank: int, slot: Slot) -> None:
        """Copy this rank's part of the slot into the image of its file; nothing for a rank that writes none."""
        layout = plan.layouts[rank]
        if layout is None:
            return
        header = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
        self._bytes[: len(layout.header)].copy_(header)
        is_pinned = self._bytes.is_pinned()
        for stretch in plan.stretches[rank]:
            source = slot.flat(stretch.part)[stretch.source : stretch.source + stretch.numel]
            copy_bits(self._view(stretch), source.detach(), non_blocking=is_pinned)
        if is_pinned:
            torch.cuda.synchronize()

    @property
    def image(self) -> memoryview:
        return memoryview(self._bytes.numpy())

    def _view(self, stretch: Stretch) -> torch.Tensor:
        dtype = _TORCH_DTYPES[stretch.dtype]
        return self._bytes[stretch.target : stretch.target + stretch.numel * dtype.itemsize].view(dtype)

    def find_non_finite(self, plan: SavePlan, rank: int) -> str | None:
        """A part that holds NaN or infinity. Runs beside the trainer, so it holds the interpreter for no longer than a
        call takes to begin."""
        for stretch in plan.stretches[rank]:
            if not _is_finite(self._view(stretch).view(torch.uint8).numpy(), stretch.dtype):
                return stretch.part
        return None


def _is_finite(values: NDArray[np.uint8], dtype: str) -> bool:
    """Of little-endian floats. Two passes that allocate nothing: as signed integers the positive ones sort as floats
    do, as unsigned ones the negative ones come last."""
    signed, unsigned = _INTEGERS[dtype]
    infinity = _INFINITY[dtype]
    sign = 1 << (8 * np.dtype(unsigned).itemsize - 1)
    return int(values.view(signed).max()) < infinity and int(values.view(unsigned).max()) < sign | infinity


class SaveBuffers:
    """The buffers of one rank: at most `most` in use at once, and together no more than `most_bytes` unless a single
    one needs it."""

    def __init__(self, most: int, most_bytes: int, pin: bool) -> None:
        self._most, self._most_bytes, self._pin = most, most_bytes, pin
        self._lock = threading.Lock()
        self._idle: list[SaveBuffer] = []
        self._in_use: list[SaveBuffer] = []

    def prepare(self, num_bytes: int) -> None:
        """See to it that the first save of this size finds its memory there."""
        with self._lock:
            if not any(buffer.size >= num_bytes for buffer in (*self._idle, *self._in_use)) and self._fits(num_bytes):
                self._idle.append(SaveBuffer(num_bytes, self._pin))

    def take(self, num_bytes: int) -> SaveBuffer:
        """Raises `CommandFailed` (SAVE_BUFFERS_FULL) while too many are in use."""
        with self._lock:
            buffer = self._fitting(num_bytes)
            if buffer is None:
                raise CommandFailed(
                    ErrorKind.SAVE_BUFFERS_FULL, f"{len(self._in_use)} saves are being written, and hold all buffers"
                )
            self._in_use.append(buffer)
            return buffer

    def give_back(self, buffer: SaveBuffer) -> None:
        with self._lock:
            self._in_use.remove(buffer)
            self._idle.append(buffer)

    @contextmanager
    def lent(self, buffer: SaveBuffer) -> Iterator[SaveBuffer]:
        try:
            yield buffer
        finally:
            self.give_back(buffer)

    def _fitting(self, num_bytes: int) -> SaveBuffer | None:
        if len(self._in_use) >= self._most:
            return None
        large_enough = [buffer for buffer in self._idle if buffer.size >= num_bytes]
        if large_enough:
            smallest = min(large_enough, key=lambda buffer: buffer.size)
            self._idle.remove(smallest)
            return smallest
        while self._idle and not self._fits(num_bytes):
            self._idle.pop()
        if self._fits(num_bytes) or not self._in_use:
            return SaveBuffer(num_bytes, self._pin)
        return None

    def _fits(self, num_bytes: int) -> bool:
        return sum(buffer.size for buffer in (*self._idle, *self._in_use)) + num_bytes <= self._most_bytes
