"""What is read for a slot is what was stored, in its place, and a value that is not finite is named."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.trainer_cell.vault.checkpoints import ADDRESS, EPOCH, manifest_of, new_vault
from trainer_cell.checkpoint import slot_reader
from trainer_cell.checkpoint.slot_reader import SlotReader
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.training.adapter import Sharding
from trainer_cell.vault import shard_file
from trainer_cell.vault.manifest import read_manifest
from trainer_cell.vault.publish import begin, finish
from trainer_cell.vault.shard_file import TensorPiece, write_shard
from trainer_cell.vault.shard_layout import KeptMemory

PARTS = ("weight", "exp_avg")
# In the order of the slot's buffer; the second leaves a gap behind it there.
SHAPES = {"a": (32, 64), "b": (3, 5), "c": (64, 32)}
BEGINS = {"a": 0, "b": 2048, "c": 2064}


@dataclass
class FlatAdapter:
    """As much of an adapter as a reader asks for."""

    flat: torch.Tensor = field(default_factory=lambda: torch.zeros(2064 + 2048))
    table: dict[str, Sharding] = field(
        default_factory=lambda: {name: Sharding(shape, None, 0, shape) for name, shape in SHAPES.items()}
    )
    whole: dict[str, tuple[int, int]] = field(default_factory=lambda: dict(SHAPES))

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            name: flat[begin : begin + math.prod(SHAPES[name])].view(SHAPES[name]) for name, begin in BEGINS.items()
        }


def tensors() -> dict[str, torch.Tensor]:
    return {
        f"{name}/{part}": torch.randn(shape, generator=torch.Generator().manual_seed(at))
        for part in PARTS
        for at, (name, shape) in enumerate(SHAPES.items(), start=len(part))
    }


def publish(root: Path, stored: dict[str, torch.Tensor]) -> Path:
    vault = new_vault(root)
    staging = begin(vault, ADDRESS, False, 0, EPOCH)
    pieces = [
        TensorPiece(key, "F32", tuple(value.shape), tuple(value.shape), None, 0, value.numpy().tobytes())
        for key, value in stored.items()
    ]
    written = write_shard(staging, "rank00000.safetensors", pieces)
    return vault.version_dir(finish(vault, staging, manifest_of([written], dtype="fp32"), False))


def reader() -> SlotReader:
    return SlotReader(FlatAdapter(), PARTS, PARTS, "fp32")  # type: ignore[arg-type]


@pytest.fixture(autouse=True, params=[512, 8 << 20], ids=["many chunks", "one chunk"])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_file, "CHUNK_SIZE", request.param)


def test_runs_put_every_tensor_into_its_place_and_gaps_stay(tmp_path: Path) -> None:
    directory = publish(tmp_path, tensors())
    parts = reader().read(directory, read_manifest(directory), KeptMemory())
    for part, runs in parts.items():
        flat = torch.full((2064 + 2048,), 7.0)
        for run in runs:
            run.copy_to(flat)
        for name, view in FlatAdapter().views(flat).items():
            assert torch.equal(view, tensors()[f"{name}/{part}"])
        assert flat[2048 + 15] == 7.0
    # `a` and `b` lie side by side in both places.
    assert {part: len(runs) for part, runs in parts.items()} == {"weight": 2, "exp_avg": 2}


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_each_of_many_ranks_reads_all(tmp_path: Path, rank: int) -> None:
    directory = publish(tmp_path, tensors())
    alone = reader().read(directory, read_manifest(directory), KeptMemory())
    among = reader().read(directory, read_manifest(directory), KeptMemory(), rank, 3)
    for part in PARTS:
        for one, other in zip(alone[part], among[part], strict=True):
            assert torch.equal(one.values, other.values)


def test_one_reader_reads_checkpoint_after_checkpoint(tmp_path: Path) -> None:
    one, memory = reader(), KeptMemory()
    for at in range(3):
        stored = {key: value + at for key, value in tensors().items()}
        directory = publish(tmp_path / str(at), stored)
        runs = one.read(directory, read_manifest(directory), memory)["exp_avg"]
        assert torch.equal(runs[-1].values, stored["c/exp_avg"].flatten())


@pytest.mark.parametrize("key", ["a/weight", "b/exp_avg", "c/exp_avg"])
@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("looked_at", [0, 64])
def test_a_value_that_is_not_finite_is_named_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, at: int, looked_at: int
) -> None:
    monkeypatch.setattr(slot_reader, "_MOST_LOOKED_AT", looked_at)
    stored = tensors()
    stored[key].view(-1)[at] = math.nan
    directory = publish(tmp_path, stored)
    with pytest.raises(CommandFailed, match=f"tensor {key} ") as failure:
        reader().read(directory, read_manifest(directory), KeptMemory())
    assert failure.value.kind == ErrorKind.NON_FINITE_STATE
