"""Run in a mount namespace of its own: saves on a tmpfs that leaves them a little more room each time.

    python -m tests.crash.small_disk DIRECTORY (bytes | bytes thoroughly | inodes)

Says `saved` or `failed` for each save; ends with an error as soon as anything is wrong.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.crash.workload import ADDRESS, NEW, OLD, check_states, demand, prepared, save, small_chunks, state_of, states
from tests.trainer_cell.vault.checkpoints import leftovers
from trainer_cell.vault.deletion import delete_checkpoint
from trainer_cell.vault.errors import StorageFailed
from trainer_cell.vault.layout import Vault
from trainer_cell.vault.publish import sweep_staging

_DISK_BYTES = 8 << 20
_PAGE = 4096


def rooms(directory: Path, limit: str) -> Iterator[int]:
    """The disk left with one more page, or inode, each time."""
    if limit == "inodes":
        used = os.statvfs(directory).f_files - os.statvfs(directory).f_ffree
        for left in range(14):
            remount(directory, f"nr_inodes={used + left}")
            yield left
        remount(directory, "nr_inodes=1000")
        return
    for left in range(0, 40 * _PAGE, _PAGE if limit == "bytes thoroughly" else 2 * _PAGE):
        ballast = directory / "ballast"
        ballast.unlink(missing_ok=True)
        free = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
        with ballast.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, free - left)
        yield left
        ballast.unlink()


def remount(directory: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(directory)], check=True)


def one_save(vault: Vault) -> str:
    """Nobody has promised it any room: what others write at the same time is not reserved either."""
    before = state_of(vault)
    try:
        save(vault, NEW, overwrite=True, shards=2, num_bytes=-(1 << 20))
    except StorageFailed as failure:
        demand(failure.errno_name == "ENOSPC", str(failure))
        ending = "failed"
    else:
        ending = "saved"
    check_states(vault, states([before if ending == "failed" else NEW]))
    assert leftovers(vault) == []
    return ending


def main(directory: Path, limit: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "none", str(directory)], check=True)
    vault = prepared(directory / "root", overwrite=True)
    for _ in rooms(directory, limit):
        ending = one_save(vault)
        sys.stdout.write(ending + "\n")
        if ending == "saved":
            # A full disk can be cleared.
            assert delete_checkpoint(vault, ADDRESS)
            sweep_staging(vault)
    save(vault, OLD, overwrite=True)
    assert state_of(vault) == OLD


if __name__ == "__main__":
    with small_chunks():
        main(Path(sys.argv[1]), sys.argv[2])
