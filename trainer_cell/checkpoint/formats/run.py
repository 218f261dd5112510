"""One import, one export: what `python -m trainer_cell.checkpoint.formats` does once its options are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trainer_cell.checkpoint.formats.errors import UnknownFormat
from trainer_cell.checkpoint.formats.peft_export import write_peft
from trainer_cell.checkpoint.formats.stored import open_stored
from trainer_cell.checkpoint.formats.target import new_directory
from trainer_cell.protocol.commands import ByteQuota
from trainer_cell.vault.layout import CheckpointAddress, Vault
from trainer_cell.vault.manifest import Manifest
from trainer_cell.vault.point import check_name

if TYPE_CHECKING:
    from trainer_cell.checkpoint.formats.foreign import Foreign
    from trainer_cell.checkpoint.formats.source import Source
    from trainer_cell.training.model_shape import ModelShape

ImportFormat = Literal["native", "torch_dist", "peft"]
ExportFormat = Literal["peft", "torch_dist"]


@dataclass(frozen=True)
class ImportJob:
    """source: a directory; format: None lets its content tell; base_model: a name or directory, prepared in `cache`.

    with_optimizer: False leaves moments and masters behind; iteration and scheduler come along all the same.
    within: the source and all its files must lie there; trust_pickle: unpickle whatever there is; quota: the tenant's.
    iteration: of a source that does not tell. weights: a Megatron checkpoint that has the base model's.
    command_id: what the checkpoint's manifest says it was made by; None: an id of its own.
    """

    source: Path
    format: ImportFormat | None
    base_model: str
    cache: Path
    root: Path
    address: CheckpointAddress
    overwrite: bool
    tenant_digest: str
    alpha: float | None
    with_optimizer: bool
    trust_pickle: bool
    within: Path | None
    quota: ByteQuota | None = None
    iteration: int = 0
    weights: Path | None = None
    command_id: str | None = None


@dataclass(frozen=True)
class Imported:
    uri: str
    version: str
    step: int
    iteration: int
    has_optimizer: bool
    has_scheduler: bool
    size_bytes: int
    format: str
    remarks: tuple[str, ...]


def run_import(job: ImportJob) -> Imported:
    """Import as told, whole or not at all.

    Raises `FormatRefused`, `CommandFailed` (QUOTA_EXCEEDED), `VaultError`, `BaseUnavailable`, `DamagedBase`,
    `UnsupportedBase` or `OSError`.
    """
    vault = Vault(job.root)
    vault.create()
    check_name(vault, job.address, job.overwrite)
    # From here on torch is needed, which takes seconds to import; a name that is taken does not wait for it.
    from trainer_cell.checkpoint.formats.publish_foreign import Destination, publish
    from trainer_cell.checkpoint.formats.source import Source
    from trainer_cell.training.base_models import identify, prepare, prepare_weights
    from trainer_cell.training.model_shape import read_shape

    source = Source(job.source, job.trust_pickle, job.within)
    chosen = job.format or format_of(source.names)
    base = prepare(job.base_model, job.cache)
    if job.weights is not None:
        base = prepare_weights(base, job.weights, job.cache)
    shape, (base_name, base_digest) = read_shape(base), identify(base)
    foreign = _read(chosen, source, shape, base_digest, job)
    destination = Destination(
        job.address, job.overwrite, job.tenant_digest, base_name, base_digest, job.quota, job.iteration, job.command_id
    )
    version, manifest = publish(vault, foreign, destination)
    return Imported(
        uri=job.address.uri,
        version=version,
        step=manifest.step,
        iteration=manifest.iteration,
        has_optimizer=manifest.has_optimizer,
        has_scheduler=manifest.has_scheduler,
        size_bytes=manifest.size_bytes,
        format=chosen,
        remarks=foreign.remarks,
    )


def format_of(names: Sequence[str]) -> ImportFormat:
    """What a directory with these files holds. A job saves native and PEFT files side by side: the former say more.

    Raises `UnknownFormat`.
    """
    if any(name.startswith("adapter_megatron_") for name in names):
        return "native"
    if "metadata.json" in names or ".metadata" in names:
        return "torch_dist"
    if "adapter_config.json" in names or any(name.startswith("adapter_model.") for name in names):
        return "peft"
    raise UnknownFormat(
        "there is no checkpoint here: neither adapter_megatron_*.pt, nor metadata.json, nor adapter_config.json"
    )


def _read(chosen: ImportFormat, source: Source, shape: ModelShape, base_digest: str, job: ImportJob) -> Foreign:
    match chosen:
        case "native":
            from trainer_cell.checkpoint.formats.native import read_native

            return read_native(source, shape, job.alpha, job.with_optimizer)
        case "torch_dist":
            from trainer_cell.checkpoint.formats.torch_dist import read_torch_dist

            return read_torch_dist(source, shape, base_digest, job.alpha, job.with_optimizer)
        case "peft":
            from trainer_cell.checkpoint.formats.peft import read_peft

            return read_peft(source, shape, job.alpha)


def run_export(checkpoint: str, root: Path, chosen: ExportFormat, target: Path) -> Manifest:
    """Write a checkpoint to the new directory `target`; the manifest of what was exported.

    checkpoint: a tinker:// address under the root, or a version's directory. Raises `FormatRefused`, `VaultError` or
    `OSError`, and nothing is left.
    """
    with open_stored(checkpoint, root) as stored, new_directory(target) as directory:
        if chosen == "peft":
            write_peft(directory, stored)
        else:
            from trainer_cell.checkpoint.formats.torch_dist import tensors_of, write_torch_dist

            write_torch_dist(directory, stored.manifest, tensors_of(stored))
        return stored.manifest
