"""Small checkpoints, saved as a cell of one or more ranks would."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from trainer_cell.protocol.commands import AdamParams, AdapterSpec
from trainer_cell.protocol.outcomes import Layout
from trainer_cell.vault.disk import LOCAL_DISK, Disk
from trainer_cell.vault.errors import StorageFailed
from trainer_cell.vault.layout import CheckpointAddress, Vault
from trainer_cell.vault.manifest import ITEM_BYTES, Manifest, TensorDType, read_manifest
from trainer_cell.vault.publish import abandon, begin, finish
from trainer_cell.vault.shard_file import TensorPiece, WrittenShard, merge_index, write_shard
from trainer_cell.vault.verify import Wanted, read_tensors

ADDRESS = CheckpointAddress("s-1:train:0", "weights", "n")
EPOCH = "EPOCH1"
LORA_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

_SHAPES: dict[str, tuple[TensorDType, tuple[int, ...]]] = {
    f"{LORA_A}/weight": ("BF16", (3, 5)),
    f"{LORA_A}/master": ("F32", (3, 5)),
    f"{LORA_A}/exp_avg": ("F32", (3, 5)),
    f"{LORA_A}/exp_avg_sq": ("F32", (3, 5)),
}


def new_vault(root: Path, disk: Disk = LOCAL_DISK) -> Vault:
    vault = Vault(root, disk)
    Vault(root).create()
    return vault


def contents(seed: int) -> dict[str, bytes]:
    """Whole tensors, told apart by `seed`."""
    chance = random.Random(seed)
    return {key: chance.randbytes(prod(shape) * ITEM_BYTES[dtype]) for key, (dtype, shape) in _SHAPES.items()}


def whole_pieces(seed: int) -> list[TensorPiece]:
    return [
        TensorPiece(key, dtype, shape, shape, None, 0, contents(seed)[key]) for key, (dtype, shape) in _SHAPES.items()
    ]


def manifest_of(shards: Sequence[WrittenShard], address: CheckpointAddress = ADDRESS, **facts: Any) -> Manifest:
    fields: dict[str, Any] = {
        "command_id": "c-1",
        "model_id": address.model_id,
        "kind": address.kind,
        "name": address.name,
        "tenant_digest": "7e",
        "base_model": "cellgate/tiny",
        "base_digest": "ba5e",
        "adapter": AdapterSpec(rank=3, alpha=32.0, train_attn=True, train_mlp=True, train_unembed=False),
        "targets": ("q_proj",),
        "iteration": 5,
        "step": 4,
        "has_optimizer": True,
        "has_scheduler": False,
        "adam_params": AdamParams(1e-4, 0.9, 0.95, 1e-12, 0.0, 1.0),
        "layout": Layout(world=1, tensor=1, pipeline=1, data=1),
        "dtype": "bf16",
        "created": "2025-11-30T12:00:00Z",
        "expires": None,
        "user_metadata": {"note": 'quotes " and ünïcode'},
        "libraries": {"torch": "2.13.0"},
        "non_finite": False,
        "tensors": merge_index(shards),
        "files": {shard.file: shard.record for shard in shards},
    }
    return Manifest(**{**fields, **facts})


def save(
    vault: Vault,
    address: CheckpointAddress = ADDRESS,
    *,
    seed: int = 1,
    overwrite: bool = False,
    epoch: str = EPOCH,
    **facts: Any,
) -> str:
    """All steps of a save with two ranks; the version."""
    pieces = whole_pieces(seed)
    staging = begin(vault, address, overwrite, sum(len(piece.data) for piece in pieces), epoch)
    try:
        shards = [write_shard(staging, f"rank{rank:05d}.safetensors", pieces[rank::2]) for rank in range(2)]
    except StorageFailed:
        abandon(staging)
        raise
    return finish(vault, staging, manifest_of(shards, address, **facts), overwrite)


WHOLE = {key: Wanted(None, 0, shape, shape, dtype) for key, (dtype, shape) in _SHAPES.items()}


def load(vault: Vault, address: CheckpointAddress = ADDRESS) -> dict[str, bytes] | None:
    """What a load reads, every byte verified; None when the name is free."""
    version = vault.resolve(address)
    if version is None:
        return None
    directory = vault.version_dir(version)
    return {key: bytes(data) for key, data in read_tensors(directory, read_manifest(directory), WHOLE).items()}


def tree(root: Path) -> list[str]:
    """Everything under `root`, the root's own lock and the epochs' aside."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.name.endswith(".lock"))


def leftovers(vault: Vault) -> list[str]:
    """What failed or crashed saves have left: in staging, or as temporary links."""
    return [name for name in tree(vault.root) if name.startswith(".staging/") or "/.point." in name]
