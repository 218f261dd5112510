"""With the service down, a command line removes nothing that a model is to be brought back from."""

from __future__ import annotations

import copy
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.cli import main
from gateway.scheduling.history import History
from gateway.scheduling.snapshot_rules import SnapshotRules
from tests.gateway.scheduling.lives import Lives, lives
from tests.gateway.scheduling.rig import failed, forward_backward, load, optim_step, path_of, save, succeeded

Capsys = pytest.CaptureFixture[str]


class Never(SnapshotRules):
    """As on a disk without room for a snapshot."""

    def is_due(self, history: History, now_s: float) -> bool:
        return False


def cellgate(root: Path, *arguments: str) -> object:
    """What it exits with: a status, or its last words."""
    with pytest.raises(SystemExit) as ended:
        main(["checkpoints", *arguments, "--state", str(root)])
    return ended.value.code


def collect(root: Path, _path: str) -> None:
    assert cellgate(root, "gc", "--replaced-grace-s", "0") == 0


def delete(root: Path, path: str) -> None:
    main(["checkpoints", "delete", path, "--state", str(root)])
    collect(root, path)


async def loaded_what_was_replaced(machine: Lives) -> tuple[str, Path, object]:
    """A model that trained on from a version whose name another has now, killed with its gateway and cell; the version,
    and the model as it was."""
    gateway = machine.gateway
    with gateway.cell() as cell:
        model = await gateway.made()
        first, step, saved = gateway.submit(model, forward_backward(), optim_step(), save())
        for future in (first, step, saved):
            await succeeded(future)
        rest = (load(path_of(model)), forward_backward(5), optim_step(), save(overwrite=True), forward_backward(6))
        for future in gateway.submit(model, *rest, first=4):
            await succeeded(future)
        before = copy.deepcopy(cell.slots.models[model])
    version = gateway.version_dir(saved.outcome)
    await gateway.end()
    gateway.socket_path.unlink()
    return model, version, before


@pytest.mark.parametrize("remove", [collect, delete])
async def test_a_version_that_a_load_without_a_snapshot_read_stays(
    tmp_path: Path, capsys: Capsys, remove: Callable[[Path, str], None]
) -> None:
    async with lives(tmp_path, rules=Never()) as machine:
        model, version, before = await loaded_what_was_replaced(machine)
        remove(tmp_path, path_of(model))
        assert version.exists()
        gateway = await machine.start()
        with gateway.cell() as cell:
            await succeeded(gateway.scheduler.submit("alice", model, 9, forward_backward(only=True)))
            assert cell.slots.models[model] == before
    assert "in use, stays for now" in capsys.readouterr().err


async def test_without_its_journal_it_would_go_and_the_model_with_it(tmp_path: Path) -> None:
    """The control: nothing but the journal keeps it there."""
    async with lives(tmp_path, rules=Never()) as machine:
        model, version, _ = await loaded_what_was_replaced(machine)
        journal = tmp_path / "journal.sqlite3"
        journal.rename(tmp_path / "elsewhere")
        collect(tmp_path, path_of(model))
        assert not version.exists()
        (tmp_path / "elsewhere").rename(journal)
        gateway = await machine.start()
        with gateway.cell():
            await failed(gateway.scheduler.submit("alice", model, 9, forward_backward(only=True)))


def leave_a_log(journal: Path) -> None:
    """As a gateway that was killed: what it wrote last is beside the file, and not in it yet."""
    work = (
        "import os, sqlite3, sys; database = sqlite3.connect(sys.argv[1]); "
        "database.execute('UPDATE counters SET value = value + 1'); database.commit(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", work, journal], check=True)
    assert Path(f"{journal}-wal").stat().st_size > 0


def write_to_no_file() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def files_of_the_journal(root: Path) -> dict[Path, bytes]:
    """Without the index of the log, which is shared memory and no state."""
    return {path: path.read_bytes() for path in root.glob("journal.sqlite3*") if not path.name.endswith("-shm")}


def collect_on_a_full_disk(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gateway.cli", "checkpoints", "gc", "--replaced-grace-s", "0", "--state", root]
    return subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=write_to_no_file)


@pytest.mark.parametrize("has_log", [False, True])
async def test_the_journal_is_read_without_a_byte_being_written(tmp_path: Path, has_log: bool) -> None:
    """On a full disk this is what makes room."""
    async with lives(tmp_path, rules=Never()) as machine:
        _, version, _ = await loaded_what_was_replaced(machine)
        if has_log:
            leave_a_log(tmp_path / "journal.sqlite3")
        files = files_of_the_journal(tmp_path)
        assert len(files) == 2 + has_log
        done = collect_on_a_full_disk(tmp_path)
        assert done.returncode == 0, done.stderr
        assert "in use, stays for now" in done.stderr
        assert files_of_the_journal(tmp_path) == files
        assert version.exists()
        await machine.start()


async def test_a_journal_that_cannot_be_read_lets_nothing_be_removed(tmp_path: Path) -> None:
    async with lives(tmp_path, rules=Never()) as machine:
        model, version, _ = await loaded_what_was_replaced(machine)
        journal = tmp_path / "journal.sqlite3"
        good = journal.read_bytes()
        journal.write_bytes(good[:5000])
        for command in (["gc", "--replaced-grace-s", "0"], ["delete", path_of(model)]):
            assert str(cellgate(tmp_path, *command)).startswith(f"cellgate: the journal {journal} cannot be read: ")
        assert version.exists()
        journal.write_bytes(good)
        await machine.start()
