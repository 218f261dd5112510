"""Makes checkpoints that no cell wrote: a copy of one with tensors or facts changed, every digest right.

What such a copy is refused for, or does to the next step, is then due to its content alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open

from trainer_cell.vault.layout import CheckpointAddress, Vault, new_ulid
from trainer_cell.vault.manifest import PieceRecord, TensorRecord, read_manifest
from trainer_cell.vault.publish import begin, finish
from trainer_cell.vault.shard_file import TensorPiece, write_shard

Change = Callable[[str, torch.Tensor], torch.Tensor | None]

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def forge(root: Path, uri: str, name: str, change: Change = lambda _, tensor: tensor, **facts: Any) -> str:
    """Publish a one-shard copy of `uri` under `name`. `change` may return None to leave a tensor out."""
    vault = Vault(root)
    address = CheckpointAddress.parse(uri)
    version = vault.resolve(address)
    assert version is not None
    manifest = read_manifest(root / version)
    pieces = []
    for file in manifest.files:
        with safe_open(root / version / file, "pt") as shard:
            for key in shard.keys():
                tensor = change(key, shard.get_tensor(key))
                if tensor is not None:
                    pieces.append(_piece(key, tensor.contiguous()))
    copy = CheckpointAddress(address.model_id, address.kind, name)
    staging = begin(vault, copy, False, sum(len(piece.data) for piece in pieces), f"forged-{new_ulid()}")
    written = write_shard(staging, "rank00000.safetensors", pieces)
    tensors = {
        piece.key: TensorRecord(
            piece.dtype,
            piece.global_shape,
            (PieceRecord("rank00000.safetensors", None, 0, piece.shape, *written.tensors[piece.key]),),
        )
        for piece in pieces
    }
    files = {"rank00000.safetensors": written.record}
    finish(vault, staging, msgspec.structs.replace(manifest, name=name, tensors=tensors, files=files, **facts), False)
    return copy.uri


def _piece(key: str, tensor: torch.Tensor) -> TensorPiece:
    data = memoryview(tensor.flatten().view(torch.uint8).numpy())
    shape = tuple(tensor.shape)
    return TensorPiece(key, _DTYPES[tensor.dtype], shape, shape, None, 0, data)


def round_masters(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """What a resume does that rebuilds masters from BF16 weights."""
    return tensor.bfloat16().float() if key.endswith("/master") else tensor
