"""One rank raises at one step of a command: a typed failure that leaves everything as it was, or the end of the epoch.
Never a hang: a `RunningCell` waits for no answer for longer than its patience."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from tests.trainer_cell import odd_base
from tests.trainer_cell.client import Client, new_id
from tests.trainer_cell.faults import AGREED, ENDING, fault, install
from tests.trainer_cell.forked_ranks import PATIENCE_S
from tests.trainer_cell.running_cell import CellEnded, RunningCell
from tests.trainer_cell.training.arithmetic import batches
from trainer_cell.protocol.commands import AdapterSpec, CreateModel, ModelCommand
from trainer_cell.protocol.errors import ErrorKind
from trainer_cell.protocol.outcomes import Failed
from trainer_cell.vault.layout import CheckpointAddress, Vault

pytestmark = pytest.mark.cell

LAYOUTS = {"dp2": (1, 1), "tp2": (2, 1), "pp2": (1, 2)}
SPEC = AdapterSpec(4, 8.0, train_attn=True, train_mlp=True, train_unembed=True)
DATA = batches(odd_base.VOCAB, 2, (17, 5, 33, 2, 64, 21))
OF_FORWARD_BACKWARD = ("validate", "pack", "forward", "loss", "backward", "accumulate")
OF_OPTIM_STEP = ("check the step", "sum gradients", "norm", "step")
OF_SAVE = ("capture", "write", "plan", "vote", "count the votes")

Start = Callable[..., "Disturbed"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return odd_base.write(tmp_path_factory.mktemp("odd") / "base")


class Disturbed:
    """A cell whose steps can be made to fail, and a model that has taken one step and has gradients of another."""

    def __init__(self, cell: RunningCell, root: Path, fault_file: Path) -> None:
        self.cell, self.root, self.fault_file = cell, root, fault_file
        self.model = Client(cell, "session:train:0", SPEC)
        self.model.create(seed=1)
        self.model.train(DATA[0])
        self.before = self.model.save(root, "before")
        cell.execute(self.model.forward_backward(DATA[1]))

    def come_to_no_answer(self, at: str, deadline_s: float = PATIENCE_S) -> None:
        """The first rank may have answered before another fails; then there is no later answer."""
        for command in (self.command(at), self.model.forward_backward(DATA[1])):
            self.cell.execute(msgspec.structs.replace(command, deadline_s=deadline_s))

    def command(self, at: str) -> ModelCommand:
        """One that comes to that step."""
        if at in OF_FORWARD_BACKWARD:
            return self.model.forward_backward(DATA[1])
        if at in OF_OPTIM_STEP:
            return self.model.optim_step()
        if at in OF_SAVE:
            return self.model.save_command("target")
        if at == "create":
            return CreateModel(new_id(), "session:train:1", SPEC, 0)
        version = Vault(self.root).resolve(CheckpointAddress(self.model.model_id, "weights", "before"))
        assert version is not None
        return self.model.load_command(version)


@pytest.fixture
def disturb(base: Path, tmp_path: Path) -> Iterator[Start]:
    started: list[RunningCell] = []

    def start(layout: str, *options: str) -> Disturbed:
        tp, pp = LAYOUTS[layout]
        file, root = tmp_path / "fault.json", tmp_path / "checkpoints"
        cell = RunningCell(base, root, *options, ranks=2, tp=tp, pp=pp, disturb=partial(install, file))
        started.append(cell)
        return Disturbed(cell, root, file)

    yield start
    for cell in started:
        cell.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_fails_before_the_ranks_depend_on_each_other_is_a_typed_failure(disturb: Start, layout: str) -> None:
    run, undisturbed = disturb(layout), disturb(layout)
    for at in (*AGREED, *(("forward", "loss", "backward") if layout == "dp2" else ())):
        for rank in (0, 1):
            with fault(run.fault_file, rank, at):
                failed = run.cell.execute(run.command(at))
            assert isinstance(failed, Failed), (at, rank, failed)
            assert failed.kind is ErrorKind.RANK_FAILED
            assert failed.message == f"rank {rank}: MemoryError: no memory to {at}"
    assert run.model.save(run.root, "after").same_as(run.before)
    assert [path for path in (run.root / ".staging").iterdir() if path.is_dir()] == []
    # The pending gradients are those of before, too.
    for one in (run, undisturbed):
        one.cell.execute(one.model.optim_step())
    assert run.model.save(run.root, "next").same_as(undisturbed.model.save(run.root, "next"))
    assert run.cell.stop() == undisturbed.cell.stop() == [0, 0]


def is_reached(layout: str, rank: int, at: str) -> bool:
    if (layout, at) == ("pp2", "loss"):
        return rank == 1
    if at in ("vote", "count the votes"):
        return rank == (1 if at == "vote" else 0)  # rank 0 counts its own without casting it
    return layout != "dp2" or at not in ("forward", "loss", "backward")


ALL_CASES = [
    (layout, rank, at) for at in ENDING for layout in LAYOUTS for rank in (0, 1) if is_reached(layout, rank, at)
]
# Every step once, every layout and rank several times.
SAMPLE = {
    *(("pp2", 0, "forward"), ("tp2", 1, "forward"), ("pp2", 1, "loss"), ("pp2", 0, "backward"), ("tp2", 1, "backward")),
    *(("tp2", 0, "accumulate"), ("dp2", 1, "sum gradients"), ("pp2", 1, "norm"), ("tp2", 1, "step")),
    *(("dp2", 0, "plan"), ("pp2", 1, "vote"), ("tp2", 0, "apply")),
    ("tp2", 0, "count the votes"),
}
CASES = [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.full) for case in ALL_CASES]


def test_a_typed_failure_of_one_rank_inside_a_shared_pass_is_no_answer_of_all(disturb: Start) -> None:
    run = disturb("tp2")
    with fault(run.fault_file, 1, "loss", how="raises typed"), pytest.raises(CellEnded, match="no memory to loss"):
        run.cell.execute(run.command("loss"))


@pytest.mark.parametrize(("layout", "rank", "at"), CASES)
def test_what_fails_where_other_ranks_wait_ends_the_epoch(disturb: Start, layout: str, rank: int, at: str) -> None:
    run = disturb(layout)
    with fault(run.fault_file, rank, at), pytest.raises(CellEnded) as ended:
        run.come_to_no_answer(at)
    assert ended.value.statuses[rank] == 1
    assert 0 not in ended.value.statuses
    assert f"no memory to {at}" in str(ended.value)


@pytest.mark.parametrize(("layout", "rank", "at"), [("tp2", 1, "forward"), ("pp2", 0, "backward"), ("dp2", 1, "norm")])
def test_a_rank_that_stands_still_ends_the_epoch_at_the_deadline_with_its_stack(
    disturb: Start, layout: str, rank: int, at: str
) -> None:
    run = disturb(layout)
    began = time.monotonic()
    with fault(run.fault_file, rank, at, how="stands still"), pytest.raises(CellEnded) as ended:
        run.come_to_no_answer(at, deadline_s=3.0)
    assert "in faulty" in str(ended.value)
    assert 0 not in ended.value.statuses
    assert time.monotonic() - began > 2.0


def test_a_rank_that_is_stopped_ends_the_epoch_at_the_deadline_of_the_next_command(disturb: Start) -> None:
    run = disturb("dp2")
    command = msgspec.structs.replace(run.model.forward_backward(DATA[1]), deadline_s=3.0)
    assert not isinstance(run.cell.execute(command), Failed)  # the control: nobody is stopped
    pid = run.cell.processes[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(CellEnded, match=r"Timeout \(0:00:03\)") as ended:
        run.cell.execute(msgspec.structs.replace(run.model.forward_backward(DATA[1]), deadline_s=3.0))
    assert time.monotonic() - began > 2.0
    assert "in broadcast" in str(ended.value)
    assert ended.value.statuses == [1, -signal.SIGKILL]


@pytest.mark.parametrize(("layout", "at"), [("tp2", "forward"), ("dp2", "norm")])
def test_a_rank_that_is_stopped_in_a_command_ends_the_epoch_at_its_deadline(
    disturb: Start, layout: str, at: str
) -> None:
    run = disturb(layout)
    began = time.monotonic()
    with (
        fault(run.fault_file, 1, at, how="stops"),
        pytest.raises(CellEnded, match=r"Timeout \(0:00:03\)") as ended,
    ):
        run.come_to_no_answer(at, deadline_s=3.0)
    assert time.monotonic() - began > 2.0
    assert "in serve" in str(ended.value)
    assert ended.value.statuses == [1, -signal.SIGKILL]
