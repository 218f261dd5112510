"""A call to the file system fails in one of real ranks, or kills it: a typed failure, or a new epoch and nothing lost.

Never a hang: neither the answer nor the end of the cell takes near as long as a vote is waited for.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.crash.rank_faults import fault, install, made
from tests.service.state import State, read_state
from tests.trainer_cell import odd_base
from tests.trainer_cell.client import Client
from tests.trainer_cell.running_cell import CellEnded, RunningCell
from tests.trainer_cell.training.arithmetic import batches
from tests.trainer_cell.vault.checkpoints import leftovers
from trainer_cell.protocol.commands import AdapterSpec
from trainer_cell.protocol.errors import ErrorKind
from trainer_cell.protocol.outcomes import Failed
from trainer_cell.vault.layout import CheckpointAddress, Vault
from trainer_cell.vault.publish import sweep_staging
from trainer_cell.vault.verify import verify_version

pytestmark = pytest.mark.cell

SPEC = AdapterSpec(4, 8.0, train_attn=True, train_mlp=True, train_unembed=True)
DATA = batches(odd_base.VOCAB, 2, (17, 5, 33, 2, 64, 21))
DEADLINE_S = 45.0

# Number of ranks, the one at fault, its call, which of those, and how it fails.
Case = tuple[int, int, str, int, str]
OF_ANY_RANK: list[tuple[str, int, str]] = [
    ("create", 1, "EACCES"), ("allocate", 1, "ENOSPC"), ("write", 1, "EIO"), ("fsync", 1, "EIO"),
    ("close", 1, "EDQUOT"),
]  # fmt: skip
OF_THE_FIRST: list[tuple[str, int, str]] = [
    ("statvfs", 1, "EIO"), ("mkdir", 1, "ENOSPC"), ("rename", 1, "EIO"), ("symlink", 1, "ENOSPC"), ("fsync", 2, "EIO"),
    ("lock", 1, "EIO"),
]  # fmt: skip
ERRORS: list[Case] = [
    *((2, 1, *how) for how in OF_ANY_RANK),
    *((2, 0, *how) for how in (*OF_ANY_RANK, *OF_THE_FIRST)),
    *((1, 0, *how) for how in (*OF_ANY_RANK, *OF_THE_FIRST)),
]
KILLS: list[Case] = [
    *((2, 1, call, 1, "SIGKILL") for call in ("create", "write", "fsync", "close")),
    *((2, 0, call, 1, "SIGKILL") for call in ("mkdir", "write", "rename", "symlink")),
    *((1, 0, call, nth, "SIGKILL") for call, nth in (("write", 1), ("fsync", 2), ("rename", 1), ("rename", 2))),
]
SAMPLE = [(2, 1, "fsync", 1, "EIO"), (2, 1, "allocate", 1, "ENOSPC"), (2, 0, "rename", 1, "EIO")]
SAMPLE_OF_KILLS = [(2, 1, "write", 1, "SIGKILL")]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return odd_base.write(tmp_path_factory.mktemp("odd") / "base")


class Cell:
    """A cell, and a model of it that has been trained a step beyond what is saved under `target`."""

    def __init__(self, base: Path, root: Path, ranks: int) -> None:
        self.root, self.fault_file = root, root.parent / "fault.json"
        self.cell = RunningCell(base, root, ranks=ranks, disturb=partial(install, self.fault_file))
        self.model = Client(self.cell, "session:train:0", SPEC)
        self.model.create(seed=1)

    @property
    def vault(self) -> Vault:
        return Vault(self.root)

    def version(self, name: str) -> str:
        version = self.vault.resolve(CheckpointAddress(self.model.model_id, "weights", name))
        assert version is not None
        return version

    def state(self, name: str) -> State:
        return read_state(self.root, f"tinker://{self.model.model_id}/weights/{name}")

    def save_under(self, case: Case) -> Failed | None:
        """Overwrite `target` while the fault is there; the failure, None when the save succeeded all the same."""
        _, rank, operation, nth, how = case
        began = time.monotonic()
        try:
            with fault(self.fault_file, rank, operation, how, nth):
                outcome = self.cell.execute(self.model.save_command("target"))
        finally:
            assert time.monotonic() - began < DEADLINE_S
        return outcome if isinstance(outcome, Failed) else None

    def check_versions(self) -> None:
        for version in self.root.glob("*/.versions/*"):
            assert verify_version(version) == []


Start = Callable[[int], Cell]


@pytest.fixture
def start(base: Path, tmp_path: Path) -> Iterator[Start]:
    """Cells over one vault, one after the other."""
    started: list[RunningCell] = []

    def act(ranks: int) -> Cell:
        cell = Cell(base, tmp_path / "checkpoints", ranks)
        started.append(cell.cell)
        return cell

    yield act
    for cell in started:
        cell.close()


def check_errors(cell: Cell, cases: list[Case]) -> None:
    cell.model.train(DATA[0])
    cell.model.save(cell.root, "target")
    for number, case in enumerate(cases):
        cell.model.train(DATA[number % 2])
        new = cell.model.save(cell.root, "new")
        old = cell.state("target")
        assert not old.same_as(new)
        failed = cell.save_under(case)
        assert failed is not None, case
        assert failed.kind is ErrorKind.STORAGE_FAILED, (case, failed)
        assert case[-1] in failed.message, (case, failed)
        if case[0] > 1 and case[2:] in OF_ANY_RANK:
            assert failed.message.startswith(f"rank {case[1]}: "), failed
        assert cell.state("target").same_as(old), case
        assert leftovers(cell.vault) == [], case
        # The slot is as it was, and the retry works.
        assert cell.model.save(cell.root, "target").same_as(new), case
    cell.check_versions()
    assert cell.cell.stop() == [0] * len(cell.cell.processes)


def check_kill(start: Start, case: Case) -> None:
    cell = start(case[0])
    cell.model.train(DATA[0])
    old = cell.model.save(cell.root, "target")
    cell.model.train(DATA[1])
    new = cell.model.save(cell.root, "new")
    with pytest.raises(CellEnded) as ended:
        cell.save_under(case)
    assert ended.value.statuses[case[1]] == -9
    found = cell.state("target")
    assert found.same_as(old)
    cell.check_versions()
    sweep_staging(cell.vault)
    assert leftovers(cell.vault) == []
    again = start(case[0])
    again.model.load(again.version("new"))
    assert again.model.save(again.root, "target").same_as(new)
    again.check_versions()


def test_a_failing_call_of_a_rank_is_one_typed_failure_and_a_killed_rank_costs_no_checkpoint(start: Start) -> None:
    check_errors(start(2), SAMPLE)
    (case,) = SAMPLE_OF_KILLS
    check_kill(start, case)


def test_every_file_of_a_save_by_two_ranks_is_made_once_by_one_of_them(start: Start) -> None:
    cell = start(2)
    cell.model.train(DATA[0])
    for name in ("a", "b", "a"):
        cell.model.save(cell.root, name)
    files = [(rank, Path(path)) for rank, path in made(cell.fault_file) if "rehearsal" not in path]
    shards = [(rank, path) for rank, path in files if path.suffix == ".safetensors"]
    assert Counter(rank for rank, _ in shards) == {0: 3, 1: 3}
    assert all(path.name == f"rank{rank:05d}.safetensors" for rank, path in shards)
    assert max(Counter(path for _, path in files).values()) == 1
    assert [rank for rank, path in files if path.name == "manifest.json"] == [0, 0, 0]
    cell.check_versions()


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_any_failing_call_of_any_rank_is_one_typed_failure(start: Start, ranks: int) -> None:
    check_errors(start(ranks), [case for case in ERRORS if case[0] == ranks])


@pytest.mark.full
@pytest.mark.parametrize("case", KILLS)
def test_a_rank_killed_at_any_call_costs_no_checkpoint(start: Start, case: Case) -> None:
    check_kill(start, case)
