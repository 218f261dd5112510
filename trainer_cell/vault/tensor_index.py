"""The tensor index of a checkpoint, which is the same for every save of one adapter shape: checked and encoded once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer_cell.vault.cover import record_problems, tensor_problems
from trainer_cell.vault.manifest import Manifest, TensorRecord, encode_entries
from trainer_cell.vault.shard_layout import ShardLayout, merge_index


@dataclass(frozen=True)
class TensorIndex:
    """tensors: what goes into `Manifest.tensors`, text: how it stands there; sizes: of the files, by name."""

    tensors: dict[str, TensorRecord]
    text: bytes
    sizes: Mapping[str, int]

    def problems(self, manifest: Manifest) -> list[str]:
        """What `index_problems` finds in a manifest whose tensors are these; they themselves are good."""
        if manifest.tensors is not self.tensors:
            return ["tensors: they are not those of the index"]
        found = [
            f"file {name}: {problem}" for name, record in manifest.files.items() for problem in record_problems(record)
        ]
        sizes = {name: record.size for name, record in manifest.files.items()}
        return found if sizes == self.sizes else [*found, "files: their names and sizes are not those of the index"]


def index_of(layouts: Sequence[ShardLayout]) -> TensorIndex:
    """Of the shards of all ranks together, those left out that hold nothing.

    Raises `ValueError` when they do not hold every element of every tensor exactly once.
    """
    layouts = [layout for layout in layouts if layout.specs]
    tensors = merge_index(layouts)
    sizes = {layout.file: layout.size for layout in layouts}
    for problem in tensor_problems(tensors, sizes):
        raise ValueError(problem)
    return TensorIndex(tensors, encode_entries(tensors), sizes)
