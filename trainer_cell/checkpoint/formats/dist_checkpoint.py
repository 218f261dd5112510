"""megatron-core's `dist_checkpointing` in one process: tensors in, tensors out, and no pickle that runs code.

It reads a private copy of a checkpoint, whose pickles have been looked through before: what is checked is what is read.
What it has written is synced and read back here, since torch's writer was seen to leave `.metadata` unflushed and to
report success with tensors missing.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import tempfile
import types
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from trainer_cell.checkpoint.formats.errors import NotExportable, SourceDamaged, UnsafePickle, told
from trainer_cell.checkpoint.formats.source import Source
from trainer_cell.training import cpu_device

METADATA = ".metadata"
_BACKEND = "metadata.json"
_COMMON = "common.pt"
# Since megatron-core 0.19 the common state is an object among the tensors.
_COMMON_OBJECT = "common_state/"
# What reading a checkpoint with something wrong in it was seen to raise, or may.
_ANY_ERROR = (
    *(RuntimeError, ValueError, TypeError, AttributeError, LookupError, EOFError, AssertionError, OSError),
    pickle.UnpicklingError,
)


@contextmanager
def one_process() -> Iterator[Any]:
    """`megatron.core.dist_checkpointing`, in a process group of this process alone."""
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=0, world_size=1)
        try:
            cpu_device.install()
            from megatron.core import dist_checkpointing

            yield dist_checkpointing
        finally:
            dist.destroy_process_group()


def read_dist(source: Source) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All tensors, whole, by key, and the common state. Raises `SourceDamaged`, `UnsafePickle`."""
    with tempfile.TemporaryDirectory(prefix="cellgate-import-") as directory:
        copy = Path(directory)
        keys = _copy_checked(source, copy)
        with one_process() as dist_checkpointing:
            try:
                tensors = dist_checkpointing.load_plain_tensors(copy)
                common = dist_checkpointing.load_common_state_dict(copy)
            # Of torch's distributed checkpoints; no `Exception`, for whatever reason.
            except (CheckpointException, dist_checkpointing.core.CheckpointingException) as error:
                raise SourceDamaged(f"megatron-core cannot read it: {_cause_of(error)}") from error
            except _ANY_ERROR as error:
                raise SourceDamaged(f"megatron-core cannot read it: {type(error).__name__}: {error}") from error
    missing = sorted(keys - tensors.keys())
    if missing:
        raise SourceDamaged(f"missing tensors: {told(missing)}")
    return {key: tensors[key] for key in sorted(keys)}, common


def _copy_checked(source: Source, copy: Path) -> set[str]:
    """The keys of the tensors that the metadata tells of."""
    source.file(_BACKEND)
    raw, metadata = source.read_metadata(METADATA)
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise SourceDamaged(f"{METADATA}: is no metadata of a checkpoint")
    shards = [name for name in source.names if name.endswith(".distcp")]
    for name in (*shards, *({_BACKEND, _COMMON} & set(source.names))):
        shutil.copyfile(source.file(name), copy / name)
    (copy / METADATA).write_bytes(raw)
    private = Source(copy, source.trust_pickle)
    if _COMMON in private.names:
        private.read_torch(_COMMON)
    for index, place in metadata.storage_data.items():
        # A path that leads elsewhere would have others' files read.
        if not isinstance(place, _StorageInfo) or place.relative_path not in shards:
            raise SourceDamaged(f"{METADATA}: tells of data in a file that is not there")
        if str(index.fqn).startswith(_COMMON_OBJECT) and not source.trust_pickle:
            _check_object(copy / place.relative_path, place.offset, place.length)
    return {key for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)}


def _check_object(file: Path, offset: int, length: int) -> None:
    """An object is stored as a pickled buffer, which is all its pickle may hold."""
    try:
        with file.open("rb") as stream:
            stream.seek(offset)
            content = io.BytesIO(stream.read(length))
        torch.load(content, pickle_module=_BUFFER_PICKLE, weights_only=False)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError, zipfile.BadZipFile) as error:
        raise SourceDamaged(f"{file.name}: its common state cannot be read: {error}") from error


class _BufferUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in {("_io", "BytesIO"), ("io", "BytesIO")}:
            return io.BytesIO
        raise UnsafePickle(f"common state: names {module}.{name}, and is not unpickled (--trust-pickle would)")


_BUFFER_PICKLE: Any = types.SimpleNamespace(
    Unpickler=_BufferUnpickler,
    load=lambda stream, **options: _BufferUnpickler(stream, **options).load(),
    UnpicklingError=pickle.UnpicklingError,
    __name__="buffer_pickle",
)


def _cause_of(error: BaseException) -> str:
    failures = getattr(error, "failures", None)
    if failures:
        wrapped = next(iter(failures.values()))
        error = wrapped[0] if isinstance(wrapped, tuple) else wrapped
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def write_dist(directory: Path, tensors: Mapping[str, torch.Tensor], common: Mapping[str, Any]) -> None:
    """Write into an empty directory; every file and the directory itself are durable when this returns.

    Raises `NotExportable` when what lies there then is not what was given, or `OSError`.
    """
    with one_process() as dist_checkpointing:
        sharded = {
            key: dist_checkpointing.ShardedTensor.from_rank_offsets(key, tensor, replica_id=0)
            for key, tensor in tensors.items()
        }
        try:
            dist_checkpointing.save({"tensors": sharded, **common}, str(directory))
        except CheckpointException as error:
            raise NotExportable(f"megatron-core cannot write it: {_cause_of(error)}") from error
    sync(directory)
    written, common_written = read_dist(Source(directory))
    if written.keys() != tensors.keys() or dict(common_written) != dict(common):
        raise NotExportable("what megatron-core has written is not what it was given")
    for key, tensor in tensors.items():
        if tensor.dtype != written[key].dtype or not torch.equal(tensor, written[key]):
            raise NotExportable(f"{key}: what megatron-core has written is not what it was given")


def sync(directory: Path) -> None:
    """fsync each file of a directory, then the directory."""
    for path in (*sorted(path for path in directory.iterdir() if path.is_file()), directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
