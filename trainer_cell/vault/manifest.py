"""`manifest.json`: what a checkpoint is and holds, readable without torch.

The text is JSON, one line for each field, tensor and file. Its last field is `manifest_digest`, the xxh3-128 of every
byte before it; later format versions keep that, so that a newer manifest can be told from a damaged one. The digests
find rot and tearing, not tampering.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import xxhash

from trainer_cell.protocol.commands import AdamParams, AdapterSpec
from trainer_cell.protocol.outcomes import Layout
from trainer_cell.vault.disk import LOCAL_DISK, Disk
from trainer_cell.vault.errors import CheckpointDamaged, NotThere, UnsupportedFormat
from trainer_cell.vault.layout import Kind

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
CHUNK_SIZE = 8 << 20

TensorDType = Literal["F32", "BF16", "F16", "I64"]
ITEM_BYTES: Mapping[str, int] = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8}

_SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.safetensors")
_TRAILER = re.compile(rb',\n  "manifest_digest": "([0-9a-f]{32})"\n}\n')
_TRAILER_BYTES = len(b',\n  "manifest_digest": "') + 32 + len(b'"\n}\n')
_MAX_MANIFEST_BYTES = 1 << 30


class PieceRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a tensor in a file.

    axis: the dimension along which the tensor is cut, None when this piece is the whole of it.
    offset: where on that axis the piece starts, in elements; shape: the piece's own.
    begin, end: its bytes, counted from the start of the file.
    """

    file: str
    axis: int | None
    offset: int
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """shape: of the whole tensor, which the pieces cover exactly once."""

    dtype: TensorDType
    shape: tuple[int, ...]
    pieces: tuple[PieceRecord, ...]


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """chunk_digests: xxh3-128 (hex) of every `chunk_size` bytes, the last chunk may be shorter; digest: xxh3-128 of
    the chunks' raw digests, one after the other."""

    size: int
    chunk_size: int
    digest: str
    chunk_digests: tuple[str, ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields in the order of the file; times are UTC, ISO 8601 with `Z`.

    base_model, base_digest: wire name of the base model, and digest of its weights.
    targets: module names the adapter sits on; adam_params: those of the last step, None before the first.
    step: Adam's; iteration: optimizer steps in the model's life. layout: parallel sizes at the save.
    scheduler: state of Megatron's `OptimizerParamScheduler` and what that leaves out of it (init_lr and those of WSD),
    counted in optimizer steps; not in the file when there is none.
    dtype: of the weights; non_finite: whether any stored tensor holds NaN or infinity.
    tensors: by key `<peft name>/<weight|master|exp_avg|exp_avg_sq>`; files: by name, the manifest itself aside.
    manifest_digest: set by `read_manifest`; what is given to `encode_manifest` is ignored.
    """

    format_version: int = FORMAT_VERSION
    command_id: str
    model_id: str
    kind: Kind
    name: str
    tenant_digest: str
    base_model: str
    base_digest: str
    adapter: AdapterSpec
    targets: tuple[str, ...]
    iteration: int
    step: int
    has_optimizer: bool
    has_scheduler: bool
    scheduler: dict[str, float | int | str | bool] | None = None
    adam_params: AdamParams | None
    layout: Layout
    dtype: Literal["fp32", "bf16"]
    created: str
    expires: str | None
    user_metadata: dict[str, str]
    libraries: dict[str, str]
    non_finite: bool
    tensors: dict[str, TensorRecord]
    files: dict[str, FileRecord]
    manifest_digest: str = ""

    @property
    def size_bytes(self) -> int:
        """Of all files but the manifest."""
        return sum(file.size for file in self.files.values())


class _Version(msgspec.Struct):
    format_version: int


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Manifest)
_tensors_decoder = msgspec.json.Decoder(dict[str, TensorRecord])
# Around the tensors' lines. Inside a JSON text a line ends nowhere else: in strings it is escaped.
_TENSORS_BEGIN = b'\n  "tensors": {\n'
_TENSORS_END = b'\n  },\n  "files": {'
_version_decoder = msgspec.json.Decoder(_Version)


def encode_manifest(manifest: Manifest, tensors_text: bytes | None = None) -> bytes:
    """tensors_text: what `encode_entries` makes of the manifest's tensors, where that is known already and checked.

    Raises `ValueError` for a manifest that would not read back as it is.
    """
    if problem := _scheduler_problem(manifest):
        raise ValueError(problem)
    if tensors_text is None:
        raw = _encode(manifest, encode_entries(manifest.tensors))
        _check_reads_back(manifest, raw)
    else:
        raw = _encode(manifest, tensors_text)
        others = msgspec.structs.replace(manifest, tensors={})
        _check_reads_back(others, _encode(others, b"{}"))
    return raw


def _encode(manifest: Manifest, tensors_text: bytes) -> bytes:
    lines = []
    for field in Manifest.__struct_fields__[:-1]:
        value = getattr(manifest, field)
        if field == "scheduler" and value is None:
            continue
        text = tensors_text if field == "tensors" else encode_entries(value) if field == "files" else _json(value)
        lines.append(f'  "{field}": '.encode() + text)
    body = b"{\n" + b",\n".join(lines)
    return body + f',\n  "manifest_digest": "{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'.encode()


def _check_reads_back(manifest: Manifest, raw: bytes) -> None:
    try:
        read = _decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise ValueError(f"the manifest breaks its own format: {error}") from error
    if read != msgspec.structs.replace(manifest, manifest_digest=read.manifest_digest):
        raise ValueError("the manifest holds values that JSON does not keep")


def _json(value: Any) -> bytes:
    return _encoder.encode(value)


def encode_entries(values: Mapping[str, Any]) -> bytes:
    """As the manifest's tensors and files are written: JSON, one line for each."""
    if not values:
        return b"{}"
    return b"{\n" + b",\n".join(b"    " + _json(key) + b": " + _json(value) for key, value in values.items()) + b"\n  }"


def decode_manifest(raw: bytes, path: Path) -> Manifest:
    """`path` is for messages. Raises `CheckpointDamaged` or `UnsupportedFormat`."""
    trailer = _TRAILER.fullmatch(raw, max(0, len(raw) - _TRAILER_BYTES))
    if trailer is None:
        raise CheckpointDamaged(path, "does not end in a manifest digest")
    if xxhash.xxh3_128_hexdigest(raw[: trailer.start()]).encode() != trailer[1]:
        raise CheckpointDamaged(path, "manifest_digest does not match")
    try:
        version = _version_decoder.decode(raw).format_version
        if version != FORMAT_VERSION:
            raise UnsupportedFormat(path, version, FORMAT_VERSION)
        manifest = _decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointDamaged(path, f"does not read as a manifest: {error}") from error
    if problem := _scheduler_problem(manifest):
        raise CheckpointDamaged(path, problem)
    for name in manifest.files:
        if not is_shard_name(name):
            raise CheckpointDamaged(path, f"files: {name!r} is not a shard's name")
    return manifest


def _decode(raw: bytes) -> Manifest:
    """As the decoder does it; but of checkpoints of one shape, which are many, the tensors are read once."""
    begin = raw.find(_TENSORS_BEGIN) + len(_TENSORS_BEGIN)
    end = raw.find(_TENSORS_END, begin)
    if begin < len(_TENSORS_BEGIN) or end < 0:
        return _decoder.decode(raw)  # not as `encode_manifest` writes it
    manifest = _decoder.decode(b"".join((raw[:begin], raw[end:])))
    return msgspec.structs.replace(manifest, tensors=_decode_tensors(raw[begin:end]))


@lru_cache(maxsize=16)
def _decode_tensors(entries: bytes) -> dict[str, TensorRecord]:
    """Shared by those who ask for the same: nobody may change it."""
    return _tensors_decoder.decode(b"{" + entries + b"}")


def _scheduler_problem(manifest: Manifest) -> str | None:
    if manifest.has_scheduler == (manifest.scheduler is not None):
        return None
    return f"has_scheduler is {str(manifest.has_scheduler).lower()}, and scheduler tells otherwise"


def read_manifest(version_dir: Path, disk: Disk = LOCAL_DISK) -> Manifest:
    """The manifest of a version, its digest verified.

    Raises `CheckpointDamaged` (also when there is none), `UnsupportedFormat` or `StorageFailed`.
    """
    path = version_dir / MANIFEST_NAME
    try:
        return decode_manifest(_read_whole(path, disk), path)
    except NotThere as error:
        raise CheckpointDamaged(version_dir, f"{MANIFEST_NAME} is missing") from error


def _read_whole(path: Path, disk: Disk) -> bytes:
    status = disk.stat(path)
    size = status.st_size
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointDamaged(path, "is not a regular file")
    if size > _MAX_MANIFEST_BYTES:
        raise CheckpointDamaged(path, f"is {size} bytes, too long for a manifest")
    buffer = memoryview(bytearray(size))
    with disk.closing(disk.open_read(path), path) as descriptor:
        count = disk.read(descriptor, path, [buffer], 0)
    return bytes(buffer[:count])


def is_shard_name(name: str) -> bool:
    """Whether a file of a version may be called so: one path segment, no other than safetensors."""
    return _SHARD_NAME.fullmatch(name) is not None


def digest_of_chunks(chunk_digests: tuple[str, ...]) -> str:
    """The digest of a whole file from those of its chunks."""
    return xxhash.xxh3_128_hexdigest(b"".join(bytes.fromhex(digest) for digest in chunk_digests))
