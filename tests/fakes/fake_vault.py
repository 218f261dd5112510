"""How a fake cell keeps its models: real checkpoints, published and read back by the vault itself."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tests.fakes.fake_model import FakeModel
from trainer_cell.protocol.commands import LoadState, SaveState
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import Hello, Progress, StateSaved
from trainer_cell.vault.disk import Disk
from trainer_cell.vault.errors import CheckpointDamaged, CheckpointExists, StorageFailed, UnsupportedFormat
from trainer_cell.vault.layout import RECOVERY, CheckpointAddress, Vault
from trainer_cell.vault.manifest import Manifest, read_manifest
from trainer_cell.vault.publish import abandon, begin, finish
from trainer_cell.vault.shard_file import TensorPiece, WrittenShard, merge_index, write_shard
from trainer_cell.vault.verify import Wanted, read_tensors

T = TypeVar("T")

_NAME = "base_model.model.lm_head.lora_A.weight"
_PARTS = ("weight", "exp_avg", "exp_avg_sq")


class WatchedDisk(Disk):
    """Tells `before` of every call, which may raise to end the cell there, as a SIGKILL would.

    But for closing, which frees locks: the kernel does that for the dead too.
    """

    def __init__(self, before: Callable[[str, Path], None]) -> None:
        self._before = before

    def call(self, operation: str, path: Path, act: Callable[[], T]) -> T:
        if operation != "close":
            self._before(operation, path)
        return super().call(operation, path, act)


def save_model(
    vault: Vault, hello: Hello, model: FakeModel, command: SaveState, report: Callable[[Progress], None]
) -> StateSaved:
    pieces = _pieces(model, _has_optimizer(command, hello))
    num_bytes = sum(len(piece.data) for piece in pieces)
    address = CheckpointAddress(command.model_id, command.kind, command.name)
    if command.quota is not None and command.kind != RECOVERY:
        command.quota.check(num_bytes)
    try:
        staging = begin(vault, address, command.overwrite, num_bytes, hello.epoch)
        report(Progress(command.command_id, "writing", 0, num_bytes))
        try:
            shard = write_shard(staging, "rank00000.safetensors", pieces)
        except StorageFailed:
            abandon(staging)
            raise
        report(Progress(command.command_id, "publishing", num_bytes, num_bytes))
        manifest = _manifest(hello, model, command, shard, has_optimizer=len(pieces) > 1)
        version = finish(vault, staging, manifest, command.overwrite)
    except CheckpointExists as error:
        raise CommandFailed(ErrorKind.CHECKPOINT_EXISTS, str(error)) from error
    except StorageFailed as error:
        raise CommandFailed(ErrorKind.STORAGE_FAILED, f"rank 0: {error}") from error
    return StateSaved(
        command.command_id, version, model.step, model.iteration, manifest.has_optimizer, manifest.size_bytes
    )


def _has_optimizer(command: SaveState, hello: Hello) -> bool:
    return command.include_optimizer and (command.kind == RECOVERY or not hello.no_save_optim)


def bytes_of(model: FakeModel, command: SaveState, hello: Hello) -> int:
    return sum(len(piece.data) for piece in _pieces(model, _has_optimizer(command, hello)))


def load_model(vault: Vault, hello: Hello, command: LoadState) -> tuple[FakeModel, bool]:
    """The model as stored, and whether with its optimizer."""
    directory = vault.version_dir(command.version)
    with_optimizer = command.load_optimizer and not (hello.no_load_optim and command.obeys_flags)
    try:
        manifest = read_manifest(directory)
        if with_optimizer and not manifest.has_optimizer:
            raise CommandFailed(ErrorKind.NO_OPTIMIZER_STATE, "the checkpoint holds no optimizer state")
        wanted = {key: Wanted(None, 0, record.shape) for key, record in manifest.tensors.items()}
        buffers = read_tensors(directory, manifest, wanted)
    except CheckpointDamaged as error:
        raise CommandFailed(ErrorKind.CHECKPOINT_CORRUPT, str(error)) from error
    except UnsupportedFormat as error:
        raise CommandFailed(ErrorKind.CHECKPOINT_INCOMPATIBLE, str(error)) from error
    except StorageFailed as error:
        raise CommandFailed(ErrorKind.STORAGE_FAILED, str(error)) from error
    values = {key.rpartition("/")[2]: struct.unpack("<f", buffers[key][:4])[0] for key in wanted}
    model = FakeModel(
        manifest.adapter, values["weight"], iteration=manifest.iteration, last_params=manifest.adam_params
    )
    if with_optimizer:
        model.momentum, model.step = values["exp_avg"], manifest.step
    return model, with_optimizer


def _pieces(model: FakeModel, with_optimizer: bool) -> list[TensorPiece]:
    values = {"weight": model.weight, "exp_avg": model.momentum, "exp_avg_sq": 0.0}
    shape = (model.adapter.rank, 1)
    return [
        TensorPiece(f"{_NAME}/{part}", "F32", shape, shape, None, 0, struct.pack("<f", values[part]) * shape[0])
        for part in (_PARTS if with_optimizer else _PARTS[:1])
    ]


def _manifest(hello: Hello, model: FakeModel, command: SaveState, shard: WrittenShard, has_optimizer: bool) -> Manifest:
    return Manifest(
        command_id=command.command_id,
        model_id=command.model_id,
        kind=command.kind,
        name=command.name,
        tenant_digest=command.tenant_digest,
        base_model=hello.base_model.name,
        base_digest=hello.base_model.digest,
        adapter=model.adapter,
        targets=("lm_head",),
        iteration=model.iteration,
        step=model.step,
        has_optimizer=has_optimizer,
        has_scheduler=False,
        adam_params=model.last_params,
        layout=hello.layout,
        dtype=hello.dtype,
        created=command.created,
        expires=command.expires,
        user_metadata=command.user_metadata,
        libraries={"fake": "0"},
        non_finite=False,
        tensors=merge_index([shard]),
        files={shard.file: shard.record},
    )
