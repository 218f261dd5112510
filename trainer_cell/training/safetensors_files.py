"""The safetensors files of a base model: where each tensor lies, and one digest over all of them. Needs no torch."""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

_HEADER_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000


class DamagedBase(Exception):
    """The files of a base model are not whole; the message names the file or tensor."""


@dataclass(frozen=True)
class StoredTensor:
    """begin, end: absolute byte offsets in `file`; dtype in safetensors' words (`F32`, `BF16`, …)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def index_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of the directory, by name; raises `DamagedBase` for none, doubles or unreadable headers."""
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        for name, tensor in _read_header(file).items():
            if name in tensors:
                raise DamagedBase(f"{name} is both in {tensors[name].file.name} and in {file.name}")
            tensors[name] = tensor
    if not tensors:
        raise DamagedBase(f"{directory}: there are no tensors in *.safetensors")
    return tensors


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        with file.open("rb") as stream:
            (length,) = _HEADER_LENGTH.unpack(stream.read(_HEADER_LENGTH.size))
            if length > _MAX_HEADER_BYTES:
                raise DamagedBase(f"{file.name}: a header of {length} bytes is not believable")
            header = json.loads(stream.read(length))
        begin = _HEADER_LENGTH.size + length
        return {
            name: StoredTensor(
                file, entry["dtype"], tuple(entry["shape"]), *(begin + offset for offset in entry["data_offsets"])
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise DamagedBase(f"{file.name}: its header is not safetensors ({error})") from error


def weights_digest(directory: Path) -> str:
    """xxh3-128 (hex) over names, dtypes, shapes and bytes of all tensors in order of name: the same however they are
    spread over files."""
    digest = xxhash.xxh3_128()
    tensors = index_tensors(directory)
    with _mapped({tensor.file for tensor in tensors.values()}) as maps:
        for name in sorted(tensors):
            tensor = tensors[name]
            content = maps[tensor.file]
            if tensor.end > len(content):
                raise DamagedBase(f"{tensor.file.name} ends before {name} does")
            digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
            digest.update(content[tensor.begin : tensor.end])
    return digest.hexdigest()


@contextmanager
def _mapped(files: set[Path]) -> Iterator[dict[Path, memoryview]]:
    maps: dict[Path, mmap.mmap] = {}
    views: dict[Path, memoryview] = {}
    try:
        for file in files:
            with file.open("rb") as stream:
                maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            views[file] = memoryview(maps[file])
        yield views
    finally:
        for view in views.values():
            view.release()
        for content in maps.values():
            content.close()
