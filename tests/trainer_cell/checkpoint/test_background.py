"""A save is a copy and then nobody's business: the ranks go on, and what they do is not in it."""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.service.state import read_state
from tests.trainer_cell import odd_base
from tests.trainer_cell.client import Client
from tests.trainer_cell.running_cell import RunningCell
from tests.trainer_cell.training.arithmetic import batches
from trainer_cell.protocol.commands import AdapterSpec
from trainer_cell.protocol.errors import ErrorKind
from trainer_cell.protocol.outcomes import Failed, Progress, StateSaved

pytestmark = pytest.mark.cell

SPEC = AdapterSpec(4, 8.0, train_attn=True, train_mlp=True, train_unembed=True)
DATA = batches(odd_base.VOCAB, 4, (17, 5, 33, 2))
LAYOUTS = {"alone": (1, 1, 1), "dp2": (2, 1, 1), "tp2": (2, 2, 1)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return odd_base.write(tmp_path_factory.mktemp("odd") / "base")


def slow_down(gate: Path, _rank: int) -> None:
    """Let no rank write a shard while `gate` is there."""
    publication: Any = importlib.import_module("trainer_cell.checkpoint.publication")
    write_image = publication.write_image

    def slow(*arguments: Any) -> Any:
        while gate.exists():
            time.sleep(0.005)
        return write_image(*arguments)

    publication.write_image = slow


class Slowed:
    """A cell that writes nothing while its gate is shut, and a model that has taken a step."""

    def __init__(self, base: Path, directory: Path, layout: str, *options: str) -> None:
        ranks, tp, pp = LAYOUTS[layout]
        self.root, self._gate = directory / "checkpoints", directory / "gate"
        self.cell = RunningCell(
            base, self.root, *options, ranks=ranks, tp=tp, pp=pp, disturb=partial(slow_down, self._gate)
        )
        self.model = Client(self.cell, "session:train:0", SPEC)
        self.model.create(seed=1)
        self.model.train(DATA[0])

    def shut(self) -> None:
        self._gate.touch()

    def open(self) -> None:
        self._gate.unlink()


@pytest.fixture
def start(base: Path, tmp_path: Path) -> Iterator[Callable[..., Slowed]]:
    started: list[Slowed] = []

    def start(layout: str, *options: str) -> Slowed:
        started.append(Slowed(base, tmp_path, layout, *options))
        return started[-1]

    yield start
    for one in started:
        one.cell.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_follows_a_save_is_not_in_it_however_late_it_is_written(start: Callable[..., Slowed], layout: str) -> None:
    run = start(layout)
    model, other = run.model, Client(run.cell, "session:train:1", SPEC)
    other.create(seed=2)
    at_the_save = model.save(run.root, "before")
    pending = run.model.forward_backward(DATA[1])
    run.shut()
    command = model.save_command("n")
    said = run.cell.capture(command)
    assert isinstance(said, Progress)
    assert (said.phase, said.bytes_done) == ("writing", 0)
    run.cell.execute(pending)
    model.train(DATA[2])
    other.train(DATA[3])
    model.free()
    run.open()
    saved = run.cell.outcome_of(command)
    assert isinstance(saved, StateSaved)
    assert (saved.step, saved.iteration) == (1, 1)
    assert read_state(run.root, f"tinker://{model.model_id}/weights/n").same_as(at_the_save)
    # The control: the steps did change the model.
    model.load(saved.version)
    model.train(DATA[2])
    assert not model.save(run.root, "later").same_as(at_the_save)


def test_saves_of_several_models_are_written_at_once(start: Callable[..., Slowed]) -> None:
    run = start("alone")
    models = [Client(run.cell, f"session:train:{number}", SPEC) for number in range(1, 5)]
    for number, model in enumerate(models):
        model.create(seed=number)
    expected = [model.save(run.root, "before") for model in models]
    run.shut()
    commands = [model.save_command("n") for model in models]
    for command in commands:
        assert isinstance(run.cell.capture(command), Progress)
    for model in models:
        model.train(DATA[1])
    run.open()
    for model, command, state in zip(models, commands, expected, strict=True):
        assert isinstance(run.cell.outcome_of(command), StateSaved)
        assert read_state(run.root, f"tinker://{model.model_id}/weights/n").same_as(state)


@pytest.mark.parametrize("options", [("--save-buffers", "1"), ("--save-memory-mb", "1")])
def test_a_capture_without_a_buffer_is_refused_and_there_is_one_again_later(
    start: Callable[..., Slowed], options: tuple[str, ...]
) -> None:
    run = start("dp2", *options)
    run.shut()
    large = AdapterSpec(32, 8.0, train_attn=True, train_mlp=True, train_unembed=True)
    second = Client(run.cell, "session:train:1", large)
    second.create(seed=2)
    first = run.model.save_command("n")
    if options[0] == "--save-memory-mb":
        # A capture larger than the limit is let in alone.
        first = second.save_command("n")
        second = Client(run.cell, "session:train:2", large)
        second.create(seed=3)
    assert isinstance(run.cell.capture(first), Progress)
    refused = run.cell.execute(second.save_command("n"))
    assert isinstance(refused, Failed)
    assert refused.kind is ErrorKind.SAVE_BUFFERS_FULL
    run.open()
    assert isinstance(run.cell.outcome_of(first), StateSaved)
    assert isinstance(run.cell.execute(second.save_command("n")), StateSaved)
    assert [path for path in (run.root / ".staging").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("layout", ["alone", "dp2"])
def test_a_cell_that_is_stopped_publishes_first_what_it_has_captured(start: Callable[..., Slowed], layout: str) -> None:
    run = start(layout)
    run.shut()
    command = run.model.save_command("n")
    run.cell.capture(command)
    pid = run.cell.processes[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    threading.Timer(0.3, run.open).start()
    assert isinstance(run.cell.outcome_of(command), StateSaved)
    assert run.cell.stop() == [0] * len(run.cell.processes)
    assert read_state(run.root, f"tinker://{run.model.model_id}/weights/n").step == 1
