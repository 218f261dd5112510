"""A model with a checkpoint, for tests of loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from tests.gateway.scheduling.rig import (
    Rig,
    forward_backward,
    optim_step,
    path_of,
    save,
    succeeded,
)
from trainer_cell.vault.manifest import MANIFEST_NAME, Manifest, encode_manifest, read_manifest


@dataclass
class Saved:
    model: str
    path: str
    version: Path

    def rewrite(self, **fields: object) -> None:
        """Change fields of the manifest; it verifies again."""
        manifest: Manifest = msgspec.structs.replace(read_manifest(self.version), **fields)
        (self.version / MANIFEST_NAME).write_bytes(encode_manifest(manifest))


async def one_saved(gateway: Rig) -> Saved:
    """A model of rank 4, saved as `n` after one step, with one more step since."""
    model = await gateway.model()
    futures = gateway.submit(
        model, forward_backward(), optim_step(), save(), forward_backward(8), optim_step(), first=1
    )
    for future in futures:
        await succeeded(future)
    return Saved(model, path_of(model), gateway.version_dir(futures[2].outcome))
