"""The seam itself: errors by type, and what it refuses to open."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import pytest

from trainer_cell.vault.disk import LOCAL_DISK
from trainer_cell.vault.errors import AlreadyThere, CheckpointDamaged, NotThere, StorageFailed


def test_an_error_names_the_operation_the_file_and_the_errno_and_no_folder(tmp_path: Path) -> None:
    with pytest.raises(NotThere) as failure:
        LOCAL_DISK.unlink(tmp_path / "shard")
    assert str(failure.value) == "unlink shard: ENOENT (No such file or directory)"
    assert (failure.value.errno, failure.value.errno_name) == (errno.ENOENT, "ENOENT")
    with pytest.raises(AlreadyThere):
        LOCAL_DISK.make_directory(tmp_path)


@pytest.mark.parametrize("error", [NotThere("open", Path("a/b"), 2), CheckpointDamaged(Path("a/b"), "x")])
def test_an_error_survives_being_sent_to_another_rank(error: Exception) -> None:
    sent = pickle.loads(pickle.dumps(error))
    assert (type(sent), str(sent), vars(sent)) == (type(error), str(error), vars(error))


def test_reading_follows_no_symlink_and_waits_for_no_pipe(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(StorageFailed, match="ELOOP"):
        LOCAL_DISK.open_read(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    LOCAL_DISK.close(LOCAL_DISK.open_read(tmp_path / "pipe"), tmp_path / "pipe")


def test_removing_a_tree_follows_no_symlink(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").write_text("x")
    (tmp_path / "doomed/deep").mkdir(parents=True)
    (tmp_path / "doomed/deep/link").symlink_to(tmp_path / "kept")
    LOCAL_DISK.remove_tree(tmp_path / "doomed")
    LOCAL_DISK.remove_tree(tmp_path / "doomed")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "kept"]
