"""A cell outlives its gateway: the next one finds what came of every command, and none is run twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from tests.service.state import State
from tests.trainer_cell import odd_base
from tests.trainer_cell.checkpoint.test_background import slow_down
from tests.trainer_cell.client import Client
from tests.trainer_cell.forked_ranks import PATIENCE_S
from tests.trainer_cell.running_cell import RunningCell
from tests.trainer_cell.training.arithmetic import batches
from trainer_cell.protocol.commands import AdapterSpec, CreateModel, DiscardGradients, ForwardBackward, ModelCommand
from trainer_cell.protocol.errors import ErrorKind
from trainer_cell.protocol.outcomes import (
    Failed,
    ForwardBackwardDone,
    GradientsDiscarded,
    ModelCreated,
    OptimStepDone,
    Outcome,
    Progress,
    StateLoaded,
    StateSaved,
)
from trainer_cell.vault.layout import CheckpointAddress, Vault

pytestmark = pytest.mark.cell

SPEC = AdapterSpec(4, 8.0, train_attn=True, train_mlp=True, train_unembed=True)
DATA = batches(odd_base.VOCAB, 3, (17, 5, 33, 2))
RANKS = {"alone": 1, "dp2": 2}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return odd_base.write(tmp_path_factory.mktemp("odd") / "base")


class Left:
    """A cell whose saves wait while its gate is shut, with a model of turn 0; all that was said is acknowledged."""

    def __init__(self, base: Path, directory: Path, layout: str) -> None:
        self.root, self.gate = directory / "checkpoints", directory / "gate"
        self.cell = RunningCell(base, self.root, ranks=RANKS[layout], disturb=partial(slow_down, self.gate))
        self.model = Client(self.cell, "session:train:0", SPEC)
        created = self.model.create(seed=1)
        self.cell.acknowledge(created.command_id)

    def forward_backward(self, turn: int) -> ForwardBackward:
        return msgspec.structs.replace(self.model.forward_backward(DATA[0]), turn=turn)

    def turn(self) -> int:
        (resident,) = self.cell.hello.models
        return resident.turn

    def leave_during(self, *commands: ForwardBackward) -> None:
        for command in commands:
            self.cell.send(command)
        self.cell.hang_up()

    def step_and_look(self, name: str) -> State:
        step = self.model.optim_step()
        # Clipped, a gradient that was added twice would make the same step.
        adam = msgspec.structs.replace(step.adam, grad_clip_norm=0.0)
        self.cell.do(msgspec.structs.replace(step, adam=adam), OptimStepDone)
        return self.model.save(self.root, name)


@pytest.fixture
def start(base: Path, tmp_path: Path) -> Iterator[Callable[[str], Left]]:
    started: list[Left] = []

    def start(layout: str) -> Left:
        started.append(Left(base, tmp_path / str(len(started)), layout))
        return started[-1]

    yield start
    for one in started:
        one.cell.close()


@pytest.mark.parametrize("layout", RANKS)
def test_what_came_of_a_command_is_in_the_next_hello_and_it_is_not_run_again(
    start: Callable[[str], Left], layout: str
) -> None:
    run = start(layout)
    first = run.forward_backward(turn=1)
    run.leave_during(first)
    hello = run.cell.come_back()
    (outcome,) = hello.outcomes
    assert isinstance(outcome, ForwardBackwardDone)
    assert (outcome.command_id, run.turn()) == (first.command_id, 1)
    # Sent once more it is answered alike, and its gradient is not added again.
    assert run.cell.execute(first) == outcome
    state = run.step_and_look("once")
    control = start(layout)
    control.cell.execute(control.forward_backward(turn=1))
    assert control.step_and_look("once").same_as(state)
    # The control: run twice it makes another model, and it is run once it is no longer remembered.
    twice = start(layout)
    command = twice.forward_backward(turn=1)
    for _ in range(2):
        twice.cell.do(command, ForwardBackwardDone)
        twice.cell.acknowledge(command.command_id)
    assert not twice.step_and_look("twice").same_as(state)


def test_outcomes_are_told_again_in_order_until_they_are_acknowledged(start: Callable[[str], Left]) -> None:
    run = start("alone")
    unknown = msgspec.structs.replace(run.forward_backward(turn=3), model_id="nobody:train:0", command_id="unknown")
    commands = [run.forward_backward(turn=1), run.forward_backward(turn=2)]
    run.leave_during(*commands, unknown)
    for _ in range(2):
        outcomes = run.cell.come_back().outcomes
        assert [outcome.command_id for outcome in outcomes] == [*(one.command_id for one in commands), "unknown"]
        assert isinstance(outcomes[2], Failed)
        assert outcomes[2].kind is ErrorKind.UNKNOWN_MODEL
        run.cell.hang_up()
    run.cell.come_back()
    run.cell.acknowledge(commands[0].command_id, "unknown")
    run.cell.hang_up()
    assert [outcome.command_id for outcome in run.cell.come_back().outcomes] == [commands[1].command_id]
    run.cell.acknowledge(commands[1].command_id)
    # Many commands later nothing is left of those that were acknowledged.
    for number in range(50):
        command = DiscardGradients(f"discard-{number}", run.model.model_id, turn=4 + number)
        run.cell.do(command, GradientsDiscarded)
        run.cell.acknowledge(command.command_id)
    run.cell.hang_up()
    assert run.cell.come_back().outcomes == ()
    assert run.turn() == 53


@pytest.mark.parametrize("layout", RANKS)
def test_a_save_that_outlives_its_gateway_is_told_to_be_under_way_and_its_outcome_follows(
    start: Callable[[str], Left], layout: str
) -> None:
    run = start(layout)
    run.gate.touch()
    command = run.model.save_command("n")
    assert isinstance(run.cell.capture(command), Progress)
    run.cell.hang_up()
    hello = run.cell.come_back()
    assert (hello.publishing, hello.outcomes) == ((command.command_id,), ())
    # It is not begun again, and what it comes to is said to whoever is there.
    run.cell.send(command)
    run.gate.unlink()
    saved = run.cell.outcome_of(command)
    assert isinstance(saved, StateSaved)
    run.cell.hang_up()
    hello = run.cell.come_back()
    assert (hello.publishing, hello.outcomes) == ((), (saved,))
    assert run.cell.execute(command) == saved
    assert [path.name for path in (run.root / saved.version).parent.iterdir()] == [Path(saved.version).name]


def test_the_outcome_of_a_save_that_nobody_was_there_for_is_in_the_next_hello(start: Callable[[str], Left]) -> None:
    run = start("alone")
    run.gate.touch()
    command = run.model.save_command("n")
    run.cell.capture(command)
    run.cell.hang_up()
    run.gate.unlink()
    deadline = time.monotonic() + PATIENCE_S
    while run.cell.come_back().publishing:  # each gateway hangs up at once
        assert time.monotonic() < deadline
        run.cell.hang_up()
    (saved,) = run.cell.hello.outcomes
    assert isinstance(saved, StateSaved)
    assert saved.command_id == command.command_id


def test_a_slot_tells_the_turn_of_the_last_command_that_changed_it(start: Callable[[str], Left]) -> None:
    run = start("alone")
    model = run.model

    def turn_after(command: ModelCommand, kind: type[Outcome], turn: int) -> int:
        run.cell.do(msgspec.structs.replace(command, turn=turn), kind)
        run.cell.hang_up()
        run.cell.come_back()
        return run.turn()

    looked_at = msgspec.structs.replace(model.forward_backward(DATA[0]), forward_only=True)
    assert turn_after(model.forward_backward(DATA[0]), ForwardBackwardDone, 5) == 5
    assert turn_after(looked_at, ForwardBackwardDone, 6) == 5
    assert turn_after(model.optim_step(), OptimStepDone, 7) == 7
    assert turn_after(model.optim_step(), Failed, 8) == 7  # there are no gradients
    assert turn_after(model.save_command("n"), StateSaved, 9) == 7
    assert turn_after(DiscardGradients("discard", model.model_id), GradientsDiscarded, 10) == 10
    saved = model.save(run.root, "m")
    version = Vault(run.root).resolve(CheckpointAddress(model.model_id, "weights", "m"))
    assert version is not None
    assert turn_after(model.load_command(version), StateLoaded, 12) == 12
    assert model.save(run.root, "m").same_as(saved)
    other = CreateModel("other", "session:train:1", SPEC, 2, turn=3)
    run.cell.do(other, ModelCreated)
    run.cell.hang_up()
    assert [resident.turn for resident in run.cell.come_back().models] == [12, 3]
