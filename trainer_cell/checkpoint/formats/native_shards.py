"""The adapter files of all ranks, put into the order of the layout they were saved under."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from trainer_cell.checkpoint.formats.errors import Incompatible, SourceDamaged, told
from trainer_cell.checkpoint.formats.foreign import Tensors, features_of
from trainer_cell.checkpoint.formats.megatron_names import Place, parse_all
from trainer_cell.checkpoint.formats.source import Source
from trainer_cell.training.model_shape import ModelShape

_BY_RANK = re.compile(r"adapter_megatron_rank(\d+)\.pt")
_BY_PLACE = re.compile(r"adapter_megatron_tp(\d+)_pp(\d+)\.pt")
_ANY = re.compile(r"adapter_megatron_.*\.pt")


@dataclass(frozen=True)
class Shard:
    """One rank's adapter file, in the file's order."""

    file: str
    tensors: Tensors
    places: dict[str, Place]


@dataclass(frozen=True)
class Grid:
    """shards[stage][tensor-parallel rank]; data: how many copies there were of each, None where files do not tell."""

    shards: list[list[Shard]]
    data: int | None

    @property
    def tensor(self) -> int:
        return len(self.shards[0])

    def first_rank(self, stage: int, tensor_rank: int, data: int) -> int:
        """The global rank of the first copy."""
        return tensor_rank + self.tensor * data * stage


def read_grid(source: Source, shape: ModelShape) -> Grid:
    """Raises `FormatRefused` unless the files of every rank are there, and agree."""
    return _grid_by_rank(source, shape) if numbered(source, _BY_RANK) else _grid_by_place(source)


def numbered(source: Source, pattern: re.Pattern[str]) -> dict[int, str]:
    """Rank → file name; raises `SourceDamaged` for a gap."""
    found = {int(match[1]): match[0] for match in map(pattern.fullmatch, source.names) if match}
    for rank in range(max(found, default=-1)):
        if rank not in found:
            raise SourceDamaged(f"{pattern.pattern.replace(chr(92), '').replace('(d+)', str(rank))}: is missing")
    return found


def _shard(source: Source, file: str) -> Shard:
    content = source.read_torch(file)
    if not isinstance(content, dict) or not content:
        raise SourceDamaged(f"{file}: holds no tensors by name")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise SourceDamaged(f"{file}: {name!r} is no tensor")
    return Shard(file, {name: tensor.detach() for name, tensor in content.items()}, parse_all(content))


def _grid_by_place(source: Source) -> Grid:
    found = {(int(match[2]), int(match[1])) for match in map(_BY_PLACE.fullmatch, source.names) if match}
    others = [name for name in source.names if _ANY.fullmatch(name) and not _BY_PLACE.fullmatch(name)]
    if others:
        raise Incompatible(f"{told(others)}: adapters of experts are not read here")
    if not found:
        raise SourceDamaged("adapter_megatron_rank0.pt: the file is missing")
    num_stages, tensor = max(stage for stage, _ in found) + 1, max(at for _, at in found) + 1
    names = [[f"adapter_megatron_tp{at}_pp{stage}.pt" for at in range(tensor)] for stage in range(num_stages)]
    return Grid([_same_names([_shard(source, name) for name in row]) for row in names], None)


def _grid_by_rank(source: Source, shape: ModelShape) -> Grid:
    shards = [_shard(source, file) for _, file in sorted(numbered(source, _BY_RANK).items())]
    tensor, num_stages = _tensor_size(shards[0], shape), _num_stages(shards[0], shape)
    data, left = divmod(len(shards), tensor * num_stages)
    if left or not data:
        raise SourceDamaged(
            f"{len(shards)} files adapter_megatron_rank*.pt: by their shapes they are of {tensor} tensor-parallel "
            f"ranks and {num_stages} stages, so some are missing"
        )
    rows = []
    for stage in range(num_stages):
        of_stage = shards[stage * data * tensor : (stage + 1) * data * tensor]
        for copy in range(1, data):
            for at in range(tensor):
                _check_copy(of_stage[at], of_stage[copy * tensor + at])
        rows.append(_same_names(of_stage[:tensor]))
    return Grid(rows, data)


def _same_names(row: list[Shard]) -> list[Shard]:
    for shard in row[1:]:
        different = shard.tensors.keys() ^ row[0].tensors.keys()
        if different:
            raise SourceDamaged(f"{shard.file}: holds other tensors than {row[0].file}: {told(sorted(different))}")
    return row


def _check_copy(first: Shard, copy: Shard) -> None:
    _same_names([first, copy])
    for name, tensor in first.tensors.items():
        if tensor.dtype != copy.tensors[name].dtype or not torch.equal(tensor, copy.tensors[name]):
            raise SourceDamaged(f"{copy.file}: {name} differs from its data-parallel copy in {first.file}")


def _tensor_size(shard: Shard, shape: ModelShape) -> int:
    """Told by any tensor that Megatron always cuts: B of a column-parallel layer, A of a row-parallel one."""
    features = features_of(shape)
    for name, place in shard.places.items():
        out_features = sum(features[path][0] for path in place.projections(0))
        in_features = features[place.projections(0)[0]][1]
        tensor = shard.tensors[name]
        is_row = place.module in ("linear_proj", "linear_fc2")
        if tensor.dim() == 2 and min(tensor.shape) > 0 and is_row == (place.half == "A"):
            whole, piece = (in_features, tensor.size(1)) if is_row else (out_features, tensor.size(0))
            return -(-whole // int(piece))
    raise SourceDamaged(f"{shard.file}: no tensor tells how many tensor-parallel ranks there were")


def _num_stages(shard: Shard, shape: ModelShape) -> int:
    num_layers = num_layers_of(shard)
    return max(1, shape.num_layers // num_layers) if num_layers else 1


def num_layers_of(shard: Shard) -> int:
    return 1 + max((place.layer for place in shard.places.values() if place.layer is not None), default=-1)
