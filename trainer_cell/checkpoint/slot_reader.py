"""Reads what one rank holds of a model, aside from any slot; what is the same for every checkpoint of a shape is found
out once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer_cell.checkpoint.plan import part_dtype
from trainer_cell.checkpoint.runs import Placed, Span, copy_bits, find_spans, is_finite
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.training.adapter import Adapter
from trainer_cell.vault.manifest import ITEM_BYTES, Manifest, TensorDType
from trainer_cell.vault.shard_layout import KeptMemory
from trainer_cell.vault.verify import TensorReader, Wanted

# Where tensors lie scattered there are many spans; those beyond are checked when all is read.
_MOST_LOOKED_AT = 64
_TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Run:
    """values: 1-D, of one or more tensors; target: where in the slot's flat buffers they belong, in elements."""

    values: torch.Tensor
    target: int

    def copy_to(self, flat: torch.Tensor) -> None:
        target = flat[self.target : self.target + self.values.numel()]
        if target.dtype == self.values.dtype:
            copy_bits(target, self.values)
        else:
            target.copy_(self.values)


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

    def read(
        self,
        directory: Path,
        manifest: Manifest,
        memory: KeptMemory,
        rank: int = 0,
        world: int = 1,
        takes_any_value: bool = False,
    ) -> dict[str, list[Run]]:
        """Each part, in `memory`, until that is given to the next; `world` ranks read at once.

        Raises what `TensorReader` raises, and `CommandFailed` (NON_FINITE_STATE) for NaN and infinity, unless it
        `takes_any_value`.
        """
        looking: list[_Looking] = []

        def look(read: memoryview, places: Mapping[str, tuple[int, int]]) -> _Looking:
            if places is not self._places:
                self._spans = {part: self._spans_of(part, places) for part in self._dtypes}
                self._places = places
            looking.append(_Looking(read, self._spans, self._dtypes, takes_any_value))
            return looking[-1]

        self._reader.read(directory, manifest, allocate=memory, look=look, reader=rank, num_readers=world)
        return {part: [self._run(looking[0], span, part) for span in spans] for part, spans in self._spans.items()}

    def _spans_of(self, part: str, places: Mapping[str, tuple[int, int]]) -> list[Span]:
        keys = {name: f"{name}/{part}" for name in self._targets}
        placed = [Placed(key, *places[key], self._targets[name]) for name, key in keys.items()]
        return find_spans(placed, ITEM_BYTES[self._dtypes[part]])

    def _run(self, looking: _Looking, span: Span, part: str) -> Run:
        if not looking.is_good(span, part):
            assert self._places is not None
            key = next(key for key in span.keys if not is_finite(looking.values(*self._places[key], part)))
            raise CommandFailed(
                ErrorKind.NON_FINITE_STATE, f"tensor {key} of the checkpoint holds NaN or infinite values"
            )
        return Run(looking.values(span.begin, span.end, part), span.target)


class _Looking:
    """Looks for NaN and infinity in each stretch of memory that has been read, while it is in cache."""

    def __init__(
        self,
        memory: memoryview,
        spans: Mapping[str, list[Span]],
        dtypes: Mapping[str, TensorDType],
        takes_any_value: bool,
    ) -> None:
        self._memory = memory
        self._spans, self._dtypes = spans, dtypes
        self._takes_any_value = takes_any_value
        self._finite: set[tuple[int, int]] = set()

    def __call__(self, begin: int, end: int) -> None:
        if self._takes_any_value:
            return
        for part, spans in self._spans.items():
            for span in spans[:_MOST_LOOKED_AT]:
                first, last = max(begin, span.begin), min(end, span.end)
                if first < last and is_finite(self.values(first, last, part)):
                    self._finite.add((first, last))

    def is_good(self, span: Span, part: str) -> bool:
        """Finite, the whole span, if it must be; what no stretch has held is looked at now."""
        if self._takes_any_value:
            return True
        found = sum(end - begin for begin, end in tuple(self._finite) if span.begin <= begin < span.end)
        return found == span.end - span.begin or is_finite(self.values(span.begin, span.end, part))

    def values(self, begin: int, end: int, part: str) -> torch.Tensor:
        """1-D, a view of memory."""
        return torch.frombuffer(self._memory[begin:end], dtype=_TORCH_DTYPES[self._dtypes[part]])
