"""Reads what one rank holds of a model, aside from any slot; what is the same for every checkpoint of a shape is found
out once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer_cell.checkpoint.plan import part_dtype
from trainer_cell.checkpoint.runs import Placed, Span, find_spans, is_finite
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.training.adapter import Adapter
from trainer_cell.vault.manifest import ITEM_BYTES, Manifest
from trainer_cell.vault.shard_layout import KeptMemory
from trainer_cell.vault.verify import TensorReader, Wanted

_TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Run:
    """values: 1-D, of one or more tensors; target: where in the slot's flat buffers they belong, in elements."""

    values: torch.Tensor
    target: int

    def copy_to(self, flat: torch.Tensor) -> None:
        flat[self.target : self.target + self.values.numel()].copy_(self.values)


class SlotReader:
    """For adapters of one shape, and checkpoints that store `stored` in `dtype`, of which `needed` are read."""

    def __init__(self, adapter: Adapter, stored: tuple[str, ...], needed: tuple[str, ...], dtype: str) -> None:
        wanted = {
            f"{name}/{part}": Wanted(
                sharding.axis, sharding.offset, sharding.local_shape, sharding.global_shape, part_dtype(part, dtype)
            )
            for part in needed
            for name, sharding in adapter.table.items()
        }
        # What other ranks read, they check; here it must only be known, so that a tensor no rank asks for is found.
        left = {f"{name}/{part}" for part in stored for name in adapter.whole} - wanted.keys()
        self._reader = TensorReader(wanted, left)
        self._dtypes = {part: part_dtype(part, dtype) for part in needed}
        self._targets = {name: view.storage_offset() for name, view in adapter.views(adapter.flat).items()}
        self._places: Mapping[str, tuple[int, int]] | None = None
        self._spans: dict[str, list[Span]] = {}

    def read(self, directory: Path, manifest: Manifest, memory: KeptMemory) -> dict[str, list[Run]]:
        """Each part, in `memory`, until that is given to the next. Raises what `TensorReader` raises, and
        `CommandFailed` (NON_FINITE_STATE) for NaN and infinity."""
        read, places = self._reader.read(directory, manifest, allocate=memory)
        if places is not self._places:
            self._places = places
            self._spans = {part: self._spans_of(part, places) for part in self._dtypes}
        return {part: [self._run(read, span, part) for span in spans] for part, spans in self._spans.items()}

    def _spans_of(self, part: str, places: Mapping[str, tuple[int, int]]) -> list[Span]:
        keys = {name: f"{name}/{part}" for name in self._targets}
        placed = [Placed(key, *places[key], self._targets[name]) for name, key in keys.items()]
        return find_spans(placed, ITEM_BYTES[self._dtypes[part]])

    def _run(self, memory: memoryview, span: Span, part: str) -> Run:
        dtype = _TORCH_DTYPES[self._dtypes[part]]
        values = span.values(memory, dtype)
        if not is_finite(values):
            tensors = {key: memory[begin:end] for key in span.keys for begin, end in (self._places_of(key),)}
            key = next(key for key, data in tensors.items() if not is_finite(torch.frombuffer(data, dtype=dtype)))
            raise CommandFailed(
                ErrorKind.NON_FINITE_STATE, f"tensor {key} of the checkpoint holds NaN or infinite values"
            )
        return Run(values, span.target)

    def _places_of(self, key: str) -> tuple[int, int]:
        assert self._places is not None
        return self._places[key]
