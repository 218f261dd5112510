"""More models than slots: each trains as if it had a slot of its own, also when it loses it with gradients in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.chaos.clients import Record, Trainee, first_difference
from tests.chaos.programme import FINAL, Forward, ForwardBackward, Load, Operation, OptimStep, Save
from tests.chaos.progress import Progress
from tests.service.running import RunningService
from tests.service.state import State, read_state

pytestmark = [pytest.mark.cell, pytest.mark.filterwarnings("ignore::FutureWarning")]

# Models of one kind have the same seed, data and visits: one that is trained alone stands for all of them.
NUM_KINDS = 4
SLOTS = 4

Visits = Sequence[Sequence[Operation]]


def visits(kind: int) -> Visits:
    """What a model does between two others' turns. Odd kinds leave with gradients in their slots, even ones do not."""
    rate = 1e-2 / (1 + kind)
    passes: list[Operation] = [ForwardBackward(number) for number in range(5)]
    step, back = OptimStep(rate), Load("a", optimizer=kind < 2)
    if kind % 2:
        return [
            [passes[0], step, passes[1]],
            [step, Save("a"), passes[2], passes[3]],
            [step, Forward(7)],
            [passes[4]],
            [back, passes[0], step, passes[1]],
            [step, Save(FINAL)],
        ]
    return [
        [passes[0], step],
        [passes[1], step, Save("a")],
        [passes[2], passes[3], step],
        [Forward(7), passes[4], step],
        [back],
        [passes[0], step, Save(FINAL)],
    ]


@contextmanager
def running(state: Path, slots: int, dtype: str) -> Iterator[RunningService]:
    service = RunningService(state, "--slots", str(slots), "--dtype", dtype)
    try:
        yield service.start()
        assert service.stop() == 0, "".join(service.log)
    finally:
        service.kill_everything()


def alone(service: RunningService) -> list[tuple[Record, State]]:
    """One model of each kind, one after the other."""
    client = service.client()
    left = []
    for kind in range(NUM_KINDS):
        trainee = Trainee(client, kind, Progress(1))
        for visit in visits(kind):
            trainee.do(visit)
        trainee.settle()
        left.append(what_it_left(service, trainee))
    return left


def in_turns(service: RunningService, num_models: int) -> list[tuple[Record, State]]:
    """All models, visit by visit: at every other one each has its answers before the next model's turn comes."""
    client = service.client()
    progress = Progress(1)
    trainees = [Trainee(client, number % NUM_KINDS, progress) for number in range(num_models)]
    for at in range(len(visits(0))):
        for number, trainee in enumerate(trainees):
            visit = visits(number % NUM_KINDS)[at]
            trainee.do(visit, pipelined=len(visit))
            if at % 2:
                trainee.settle()
        for trainee in trainees:
            trainee.settle()
    return [what_it_left(service, trainee) for trainee in trainees]


def what_it_left(service: RunningService, trainee: Trainee) -> tuple[Record, State]:
    record = trainee.record
    return record, read_state(service.checkpoints, f"tinker://{record.model_ids[-1]}/weights/{FINAL}")


@pytest.mark.parametrize(
    ("num_models", "dtype"),
    [(24, "fp32"), pytest.param(200, "bf16", marks=[pytest.mark.full, pytest.mark.timeout(3600)])],
)
def test_each_of_many_models_on_few_slots_is_what_it_would_be_alone(
    tmp_path: Path, num_models: int, dtype: str
) -> None:
    with running(tmp_path / "alone", NUM_KINDS, dtype) as service:
        expected = alone(service)
    with running(tmp_path / "many", SLOTS, dtype) as service:
        many = in_turns(service, num_models)
    for number, (record, state) in enumerate(many):
        quiet, final = expected[number % NUM_KINDS]
        assert first_difference(quiet, record) is None, (number, first_difference(quiet, record))
        assert state.same_as(final), number
        assert state.manifest.iteration == final.manifest.iteration, number
    assert len({state.tensors[key] for _, state in expected for key in list(state.tensors)[:1]}) == NUM_KINDS
