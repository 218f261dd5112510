"""What a checkpoint holds, read from its files with the safetensors library: the comparison is bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from trainer_cell.vault.layout import CheckpointAddress, Vault
from trainer_cell.vault.manifest import Manifest, TensorRecord, read_manifest
from trainer_cell.vault.verify import verify_version


@dataclass(frozen=True)
class State:
    """tensors: `<name>/<part>` → whole tensor as float32-exact bytes; step and iteration as recorded."""

    manifest: Manifest
    tensors: dict[str, bytes]

    @property
    def step(self) -> int:
        return self.manifest.step

    def part(self, part: str) -> dict[str, bytes]:
        return {key: value for key, value in self.tensors.items() if key.endswith(f"/{part}")}

    def same_as(self, other: State) -> bool:
        return self.tensors == other.tensors and self.step == other.step


def read_state(root: Path, uri: str) -> State:
    """Verified deeply, then read whole, put together from the pieces the manifest tells of."""
    vault = Vault(root)
    version = vault.resolve(CheckpointAddress.parse(uri))
    assert version is not None, f"{uri} is not there"
    directory = root / version
    assert verify_version(directory, deep=True) == []
    manifest = read_manifest(directory)
    with ExitStack() as open_files:
        shards = {name: open_files.enter_context(safe_open(directory / name, "pt")) for name in manifest.files}
        stored = {(name, key) for name, shard in shards.items() for key in shard.keys()}
        assert stored == {(p.file, key) for key, record in manifest.tensors.items() for p in record.pieces}
        return State(manifest, {key: _whole(key, record, shards) for key, record in manifest.tensors.items()})


def _whole(key: str, record: TensorRecord, shards: Mapping[str, Any]) -> bytes:
    pieces = sorted(record.pieces, key=lambda piece: piece.offset)
    tensor = torch.cat([shards[piece.file].get_tensor(key) for piece in pieces], pieces[0].axis or 0)
    assert tuple(tensor.shape) == record.shape
    return bytes(tensor.flatten().view(torch.uint8).numpy())
