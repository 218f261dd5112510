"""No file of an import runs code when it is read, unless the operator says that it may."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer_cell.checkpoint.formats.native_writer import Job, write_native
from tests.trainer_cell.checkpoint.formats.peft_writer import write_peft_files
from tests.trainer_cell.checkpoint.formats.states import import_job, left_in, random_state
from trainer_cell.checkpoint.formats.errors import OutsideAllowed, SourceDamaged, UnsafePickle
from trainer_cell.checkpoint.formats.source import Source
from trainer_cell.training.model_shape import ModelShape


class Trap:
    """Makes a directory when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._marker),)


def as_torch_file(file: Path, trap: Trap) -> None:
    torch.save({"iteration": 1, "a": trap}, file)


def as_plain_pickle(file: Path, trap: Trap) -> None:
    file.write_bytes(pickle.dumps(trap))


@pytest.mark.parametrize("write", [as_torch_file, as_plain_pickle])
@pytest.mark.parametrize("file", ["adapter_megatron_rank0.pt", "training_state_rank0.pt", "adapter_model.bin"])
def test_a_pickle_with_a_side_effect_is_refused_and_does_nothing(
    tmp_path: Path, root: Path, tiny: Path, shape: ModelShape, file: str, write: Callable[[Path, Trap], None]
) -> None:
    source, marker = tmp_path / "source", tmp_path / "marker"
    if file == "adapter_model.bin":
        write_peft_files(source, random_state(tiny), pickled=True)
    else:
        write_native(source, random_state(tiny), shape, Job())
    write(source / file, Trap(marker))
    with pytest.raises(UnsafePickle, match=file):
        import_job(source, root, tiny)
    assert not marker.exists()
    assert left_in(root) == []
    # The trap works: who trusts the file gets the side effect.
    with suppress(SourceDamaged):
        import_job(source, root, tiny, trust_pickle=True)
    assert marker.is_dir()


@pytest.mark.parametrize(
    "text",
    [
        b"cos\nmkdir\n(S'{marker}'\ntR.",
        b'cbuiltins\neval\n(S\'__import__("os").mkdir("{marker}")\'\ntR.',
        b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\nos\nS'mkdir'\ntR(S'{marker}'\ntR.",
        b"ctorch.distributed.checkpoint.metadata\nos.mkdir\n(S'{marker}'\ntR.",
        b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\nMetadata\nS'__init__'\ntR.",
    ],
)
def test_the_metadata_of_a_distributed_checkpoint_names_only_what_it_is_made_of(tmp_path: Path, text: bytes) -> None:
    marker = tmp_path / "marker"
    (tmp_path / ".metadata").write_bytes(text.replace(b"{marker}", str(marker).encode()))
    with pytest.raises(UnsafePickle, match=r"\.metadata"):
        Source(tmp_path).read_metadata(".metadata")
    assert not marker.exists()


@pytest.mark.parametrize("text", [b"", b"garbage", b"\x80\x04", b"I1\n"])
def test_metadata_that_is_no_pickle_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(text)
    with pytest.raises(SourceDamaged, match=r"\.metadata"):
        Source(tmp_path).read_metadata(".metadata")


def test_a_file_that_leads_out_of_the_allowed_directory_is_not_read(tmp_path: Path, root: Path, tiny: Path) -> None:
    allowed, secret = tmp_path / "allowed", tmp_path / "secret"
    allowed.mkdir()
    write_peft_files(secret, random_state(tiny))
    (allowed / "link").symlink_to(secret)
    with pytest.raises(OutsideAllowed):
        import_job(allowed / "link", root, tiny, within=allowed)
    write_peft_files(allowed / "own", random_state(tiny))
    (allowed / "own" / "adapter_model.safetensors").unlink()
    (allowed / "own" / "adapter_model.safetensors").symlink_to(secret / "adapter_model.safetensors")
    with pytest.raises(OutsideAllowed, match="adapter_model"):
        import_job(allowed / "own", root, tiny, within=allowed)
    assert left_in(root) == []
    # Where nobody is confined a link is a file like any other, as in the caches of hubs.
    assert import_job(allowed / "own", root, tiny).format == "peft"
