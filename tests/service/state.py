"""What a checkpoint holds, read from its files with the safetensors library: the comparison is bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from trainer_cell.vault.layout import CheckpointAddress, Vault
from trainer_cell.vault.manifest import Manifest, read_manifest
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
    """Verified deeply, then read whole; every tensor must be stored by exactly one file."""
    vault = Vault(root)
    version = vault.resolve(CheckpointAddress.parse(uri))
    assert version is not None, f"{uri} is not there"
    directory = root / version
    assert verify_version(directory, deep=True) == []
    manifest = read_manifest(directory)
    tensors: dict[str, bytes] = {}
    for name in manifest.files:
        with safe_open(directory / name, "pt") as shard:
            for key in shard.keys():
                assert key not in tensors
                tensors[key] = bytes(shard.get_tensor(key).contiguous().flatten().view(_uint8()).numpy())
    assert tensors.keys() == manifest.tensors.keys()
    return State(manifest, tensors)


def _uint8():  # type: ignore[no-untyped-def]
    import torch

    return torch.uint8
