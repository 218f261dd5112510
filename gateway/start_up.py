"""What `cellgate serve` starts from: `--lora-adapter-path` and `--load`, read and checked before anything runs."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import xxhash

from gateway.format_commands import formats_command, formats_environment
from gateway.scheduling.identity import model_id_of, tenant_digester
from gateway.scheduling.start_up import SESSION_ID
from gateway.settings import TRACKER, ServeSettings
from gateway.state_directory import StateDirectory
from trainer_cell.vault.adopt import adopt_version, content_of, names_for
from trainer_cell.vault.errors import VaultError
from trainer_cell.vault.layout import CheckpointAddress, Vault
from trainer_cell.vault.manifest import MANIFEST_NAME, Manifest, read_manifest

MODEL_ID = model_id_of(SESSION_ID, 0)

_RELEASE = "release"
_ITERATION = re.compile(r"[0-9]{1,18}")


class StartUpRefused(Exception):
    """The service cannot start from this; the message is one line for the operator."""


@dataclass(frozen=True)
class StartUp:
    """weights: files of the base model's weights, None for those of the base model itself.
    checkpoint: of the first model. notes: what the operator should be told.
    """

    no_load_optim: bool = False
    weights: Path | None = None
    checkpoint: CheckpointAddress | None = None
    notes: tuple[str, ...] = ()


def read_start_up(settings: ServeSettings, state: StateDirectory, keys: Mapping[str, str]) -> StartUp:
    """Raises `StartUpRefused` or `VaultError`. A checkpoint from elsewhere lies in the root then."""
    found, notes = None, []
    if settings.load is not None:
        found = read_tracker(settings.load)
        if found is None:
            notes.append(
                f"--load {settings.load} has no {TRACKER}: --no-load-optim is on, the weights are --base-model's"
            )
        else:
            notes.append(f"--load {settings.load}: the base weights are those of {found[0].name}")
    weights, iteration = found or (None, 0)
    checkpoint = None
    if settings.lora_adapter_path is not None:
        vault = Vault(settings.checkpoint_root)
        vault.create()
        with vault.lock():
            owner = tenant_digester(state.tenant_secret())(next(iter(keys.values())))
            checkpoint = start_up_address(settings, vault, owner, weights, iteration)
        notes.append(f"a new model of session {SESSION_ID} is made of {checkpoint.uri}")
    return StartUp(settings.is_without_load_optim, weights, checkpoint, tuple(notes))


def start_up_address(
    settings: ServeSettings, vault: Vault, tenant_digest: str, weights: Path | None, iteration: int
) -> CheckpointAddress:
    """The checkpoint `--lora-adapter-path` stands for, in this root and of this tenant. The root is locked.

    A directory that is not the tenant's own published checkpoint is verified and copied in, or imported. weights,
    iteration: what `--load` says. Raises `StartUpRefused`.
    """
    given = settings.lora_adapter_path
    assert given is not None
    try:
        source = _source(vault, given)
        if not (source / MANIFEST_NAME).is_file():
            return _import_older(settings, vault, source, tenant_digest, weights, iteration)
        manifest = read_manifest(source)
        own = _own_address(vault, source, manifest, tenant_digest)
        return own or adopt_version(vault, source, MODEL_ID, tenant_digest)
    except VaultError as error:
        raise StartUpRefused(f"--lora-adapter-path {given}: {error}") from error


def _import_older(
    settings: ServeSettings, vault: Vault, source: Path, tenant_digest: str, weights: Path | None, iteration: int
) -> CheckpointAddress:
    """Have a directory in another format imported as a checkpoint of `MODEL_ID`, over the weights in force; what was
    imported before, from the same files for the same base, is found again.

    Reading those formats needs torch: a child process does it. Raises `StartUpRefused`.
    """
    told = _digest_of(source, settings.base_model, str(weights), str(iteration), tenant_digest)
    for address in names_for(MODEL_ID, f"imported-{told}"):
        found = content_of(vault, address)
        if isinstance(found, Manifest) and found.command_id.startswith("import-"):
            return address
        if found == "nothing":
            break
    arguments = ["import", str(source), "--json", "--model-id", MODEL_ID, "--name", address.name]
    arguments += ["--base-model", settings.base_model, "--cache", str(settings.cache)]
    arguments += ["--tenant-digest", tenant_digest, "--checkpoints", str(vault.root), "--iteration", str(iteration)]
    arguments += ["--weights", str(weights)] if weights is not None else []
    done = subprocess.run(
        formats_command(*arguments), env=formats_environment(), stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode == 0:
        return address
    last = (done.stdout.strip() or "{}").splitlines()[-1]
    reason = json.loads(last).get("message", f"its import ended with status {done.returncode}")
    raise StartUpRefused(f"--lora-adapter-path {source}: {reason}")


def _digest_of(source: Path, *words: str) -> str:
    """Of the files of a directory, and of what else decides what an import makes of them."""
    digest = xxhash.xxh3_64("\0".join(words).encode())
    try:
        for file in sorted(path for path in source.iterdir() if path.is_file()):
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as stream:
                while chunk := stream.read(1 << 24):
                    digest.update(chunk)
    except OSError as error:
        raise StartUpRefused(f"--lora-adapter-path {source} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _source(vault: Vault, given: str) -> Path:
    if given.startswith("tinker://"):
        version = vault.resolve(CheckpointAddress.parse(given))
        if version is None:
            raise StartUpRefused(f"--lora-adapter-path {given}: there is no such checkpoint in {vault.root}")
        return vault.version_dir(version)
    try:
        source = Path(given).expanduser().resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise StartUpRefused(f"--lora-adapter-path {given}: there is no such directory") from error
    if not source.is_dir():
        raise StartUpRefused(f"--lora-adapter-path {given} is not a directory")
    return source


def _own_address(vault: Vault, source: Path, manifest: Manifest, tenant_digest: str) -> CheckpointAddress | None:
    """The public name that stands for `source`, if the tenant could load it under that."""
    if manifest.tenant_digest != tenant_digest or manifest.kind != "weights":
        return None
    if manifest.expires is not None and datetime.fromisoformat(manifest.expires) <= datetime.now(UTC):
        return None
    address = CheckpointAddress(manifest.model_id, manifest.kind, manifest.name)
    version = vault.resolve(address)
    is_it = version is not None and vault.version_dir(version).resolve() == source.resolve()
    return address if is_it else None


def read_tracker(directory: Path) -> tuple[Path, int] | None:
    """Of a `--load` directory: where its newest checkpoint's files are, and that one's iteration; None when there is
    no tracker file. Raises `StartUpRefused`."""
    if not directory.is_dir():
        raise StartUpRefused(f"--load {directory}: there is no such directory")
    try:
        word = (directory / TRACKER).read_text().strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise StartUpRefused(f"--load {directory}: {TRACKER} cannot be read ({error})") from error
    if word != _RELEASE and not _ITERATION.fullmatch(word):
        raise StartUpRefused(f"--load {directory}: {TRACKER} holds {word[:40]!r}, which is no iteration")
    iteration = 0 if word == _RELEASE else int(word)
    files = directory / (_RELEASE if word == _RELEASE else f"iter_{iteration:07d}")
    if not files.is_dir():
        raise StartUpRefused(f"--load {directory}: {TRACKER} names {files.name}, which is not there")
    return files, iteration
