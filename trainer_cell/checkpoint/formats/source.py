"""The directory an import reads: which files it holds, and pickles that run no code.

`torch.save` files are unpickled with `weights_only=True`, and the metadata of a `torch_dist` checkpoint by an
unpickler that knows the few classes it is made of: any other name in them is an `UnsafePickle`, before it is called.
"""

from __future__ import annotations

import io
import json
import pickle
import sys
from enum import EnumMeta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint

from trainer_cell.checkpoint.formats.errors import OutsideAllowed, SourceDamaged, UnknownFormat, UnsafePickle

# What `.metadata` of torch's distributed checkpoints is made of: classes of these modules, and these.
# Of a config or an index; longer ones are read by nobody.
_MOST_BYTES = 256 << 20
_METADATA_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner")
_METADATA_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
}


class Source:
    """path: of the directory, its links followed once; within: where every file must lie after its links, if told.

    trust_pickle: the operator vouches for the files: they are unpickled whole, and may run code.
    """

    def __init__(self, path: Path, trust_pickle: bool = False, within: Path | None = None) -> None:
        self.path = path.resolve()
        self.trust_pickle = trust_pickle
        self._within = None if within is None else within.resolve()
        if not self.path.is_dir():
            raise UnknownFormat(f"{path.name}: there is no such directory")
        self._check_within(self.path)
        self.names = sorted(entry.name for entry in self.path.iterdir())

    def file(self, name: str) -> Path:
        """A regular file that holds something; raises `SourceDamaged`, `OutsideAllowed`."""
        found = (self.path / name).resolve()
        self._check_within(found)
        if not found.is_file():
            raise SourceDamaged(f"{name}: the file is missing")
        if found.stat().st_size == 0:
            raise SourceDamaged(f"{name}: the file is empty")
        return found

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON object; raises `SourceDamaged`."""
        try:
            content = json.loads(self._small(name))
        except (ValueError, RecursionError) as error:
            raise SourceDamaged(f"{name}: is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise SourceDamaged(f"{name}: is not a JSON object")
        return content

    def _small(self, name: str) -> bytes:
        """Of a file that describes others; raises `SourceDamaged` for one that is too long for that."""
        file = self.file(name)
        if file.stat().st_size > _MOST_BYTES:
            raise SourceDamaged(f"{name}: is {file.stat().st_size} bytes, which is too long")
        return file.read_bytes()

    def read_torch(self, name: str) -> Any:
        """What `torch.save` wrote, on the CPU; raises `UnsafePickle`, `SourceDamaged`."""
        try:
            return torch.load(self.file(name), map_location="cpu", weights_only=not self.trust_pickle)
        except pickle.UnpicklingError as error:
            raise UnsafePickle(
                f"{name}: holds other than tensors and plain values, and is not unpickled (--trust-pickle would): "
                f"{_first_line(error)}"
            ) from error
        except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, ImportError, OSError) as error:
            raise SourceDamaged(f"{name}: cannot be read: {_first_line(error)}") from error

    def read_metadata(self, name: str) -> tuple[bytes, Any]:
        """The pickled metadata of a `torch_dist` checkpoint, raw and read; raises `UnsafePickle`, `SourceDamaged`."""
        raw = self._small(name)
        reader = pickle.Unpickler if self.trust_pickle else _MetadataUnpickler
        try:
            return raw, reader(io.BytesIO(raw)).load()
        except UnsafePickle:
            raise
        except (
            pickle.UnpicklingError,
            EOFError,
            ValueError,
            KeyError,
            IndexError,
            AttributeError,
            TypeError,
            ImportError,
        ) as error:
            raise SourceDamaged(f"{name}: cannot be read: {_first_line(error)}") from error

    def _check_within(self, path: Path) -> None:
        if self._within is not None and not path.is_relative_to(self._within):
            raise OutsideAllowed(f"{path.name}: leads out of the directory that imports are read from")


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member  # how some versions of Python pickle a member of an enum
        if (module, name) in _METADATA_NAMES:
            return super().find_class(module, name)
        found = getattr(sys.modules.get(module), name, None)
        if module in _METADATA_MODULES and isinstance(found, type) and found.__module__ == module:
            return found
        if module == "torch" and isinstance(found, torch.dtype):
            return found
        raise UnsafePickle(f".metadata: names {module}.{name}, and is not unpickled (--trust-pickle would)")


def _enum_member(holder: Any, name: Any) -> Any:
    if isinstance(holder, EnumMeta) and isinstance(name, str) and name in holder.__members__:
        return holder[name]
    raise UnsafePickle(f".metadata: reaches for {name!r} of {holder!r}, and is not unpickled")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
