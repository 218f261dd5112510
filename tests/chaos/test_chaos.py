"""Several clients of the unmodified SDK train while everything is killed again and again and connections are lost.

They notice nothing but time: each has the answers, and at the end the weights, masters, moments and step of a run in
which nothing happened, to the last bit; and nothing was done twice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.clients import first_difference
from tests.chaos.gremlin import plan_of_kills
from tests.chaos.programme import ForwardBackward, Operation, OptimStep, programme
from tests.chaos.runs import assert_same, quiet_run, read_snapshots, run_under_fire
from tests.service.running import RunningService

pytestmark = [pytest.mark.cell, pytest.mark.filterwarnings("ignore::FutureWarning")]

NUM_CLIENTS = 4
# Other clients, kills and faults, for whoever wants to see more of them.
SEED = int(os.environ.get("CELLGATE_TEST_CHAOS_SEED", "0"))
# Replaced versions stay, to be counted.
KEEP = ("--replaced-grace-s", "1000000")
# In FP32 weights are their own masters.
BF16 = ("--dtype", "bf16", "--snapshot-steps", "5")
FLAGS = ("--no-load-optim", "--no-save-optim", "--snapshot-steps", "3")
ALL_PARTS = frozenset({"weight", "master", "exp_avg", "exp_avg_sq"})


@dataclass(frozen=True)
class Case:
    """slots: fewer than clients, and models are parked in the middle of it all."""

    ranks: int
    steps: int
    kills: int
    slots: int
    options: tuple[str, ...]
    parts: frozenset[str]


SOON = pytest.mark.timeout(900)
CASES = [
    pytest.param(Case(ranks=1, steps=8, kills=4, slots=8, options=BF16, parts=ALL_PARTS), id="short", marks=SOON),
    pytest.param(
        Case(ranks=1, steps=5, kills=2, slots=2, options=FLAGS, parts=frozenset({"weight"})),
        id="flags and few slots",
        marks=SOON,
    ),
    pytest.param(
        Case(ranks=2, steps=250, kills=200, slots=8, options=BF16, parts=ALL_PARTS),
        id="long",
        marks=[pytest.mark.full, pytest.mark.timeout(10_800)],
    ),
    pytest.param(
        Case(ranks=2, steps=100, kills=60, slots=2, options=FLAGS, parts=frozenset({"weight"})),
        id="long, flags and few slots",
        marks=[pytest.mark.full, pytest.mark.timeout(7200)],
    ),
]


@contextmanager
def running(state: Path, case: Case, slots: int) -> Iterator[RunningService]:
    service = RunningService(state, "--slots", str(slots), *KEEP, *case.options, ranks=case.ranks)
    try:
        yield service.start()
        assert service.stop() == 0, "".join(service.log)
    finally:
        service.kill_everything()


def written(num_clients: int, num_steps: int) -> dict[int, list[Operation]]:
    first = SEED * NUM_CLIENTS
    return {number: programme(number, num_steps) for number in range(first, first + num_clients)}


@pytest.mark.parametrize("case", CASES)
def test_clients_of_a_service_under_fire_notice_nothing_but_time(tmp_path: Path, case: Case) -> None:
    programmes = written(NUM_CLIENTS, case.steps)
    with running(tmp_path / "quiet", case, slots=64) as service:
        quiet = quiet_run(service, programmes)
    read_snapshots(service.checkpoints, quiet)
    num_commands = sum(len(record.answers) for record in quiet.records)
    kills = plan_of_kills(SEED, case.kills, num_commands, case.ranks)
    with running(tmp_path / "fire", case, case.slots) as service:
        disturbed = run_under_fire(service, programmes, kills, case.ranks)
    read_snapshots(service.checkpoints, disturbed)
    assert_same(quiet, disturbed, programmes, case.parts)


def with_one_more(operations: list[Operation]) -> list[Operation]:
    """As if the last step before the final save had run twice, with all it is a step on. (A gradient alone that is
    added twice may be clipped to the very same one.)"""
    steps = [at for at, operation in enumerate(operations[:-6]) if isinstance(operation, OptimStep)]
    first, last = steps[-2] + 1, steps[-1] + 1
    step = [one for one in operations[first:last] if isinstance(one, ForwardBackward | OptimStep)]
    return [*operations[:last], *step, *operations[last:]]


def test_one_step_too_many_would_be_seen(tmp_path: Path) -> None:
    """The control: what the comparison of two runs is worth."""
    case = Case(ranks=1, steps=5, kills=0, slots=8, options=BF16, parts=ALL_PARTS)
    programmes = written(2, case.steps)
    with running(tmp_path, case, case.slots) as service:
        twice = quiet_run(service, programmes)
        again = quiet_run(service, programmes)
        more = quiet_run(service, {number: with_one_more(operations) for number, operations in programmes.items()})
    assert_same(twice, again, programmes, case.parts)
    for number in range(2):
        assert not more.states[number].same_as(twice.states[number])
        assert first_difference(more.records[number], twice.records[number]) is not None
