"""A model's own learning rates: what each step takes, and what the checkpoint's numbers bring back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.trainer_cell.training.arithmetic import ADAM
from tests.trainer_cell.training.snapshots import snapshot
from tests.trainer_cell.training.test_step import DATA, SPEC, overflowing
from tests.trainer_cell.training.wire import forward_backward_command, optim_command
from trainer_cell.protocol.commands import LrSchedule, Rate
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import OptimStepDone
from trainer_cell.ranks import Ranks
from trainer_cell.training.build import Base
from trainer_cell.training.lr_schedule import LrScheduler, read_scheduler
from trainer_cell.training.slots import Slot, SlotTable
from trainer_cell.training.step import forward_backward, optim_step

COSINE = LrSchedule(0.01, 0.001, 2, 6, "cosine")
BOTH: tuple[Rate, ...] = ("learning_rate", "weight_decay")


def fresh(base: Base, schedule: LrSchedule | None) -> Slot:
    return SlotTable(base, 1, 8).create("one", SPEC, 1, schedule)


def stepped(base: Base, slot: Slot, ranks: Ranks, rates: tuple[Rate, ...] = BOTH, **adam: float) -> OptimStepDone:
    forward_backward(base, slot, ranks, forward_backward_command(DATA))
    return optim_step(slot, ranks, msgspec.structs.replace(optim_command({**ADAM, **adam}), scheduled=rates))


def rates(schedule: LrSchedule, num_steps: int) -> list[float]:
    scheduler, found = LrScheduler(schedule), []
    for _ in range(num_steps):
        found.append(scheduler.learning_rate)
        scheduler.advance()
    return found


STYLES: dict[str, tuple[LrSchedule, Callable[[int], float]]] = {
    "constant": (LrSchedule(1.0, 0.0, 0, 4, "constant"), lambda _: 1.0),
    "linear": (LrSchedule(1.0, 0.2, 0, 4, "linear"), lambda n: 0.2 + 0.8 * max(0.0, 1 - n / 4)),
    "cosine": (
        LrSchedule(1.0, 0.2, 0, 4, "cosine"),
        lambda n: 0.2 + 0.4 * (1 + math.cos(math.pi * min(n, 4) / 4)),
    ),
    "inverse-square-root": (
        LrSchedule(1.0, 0.1, 0, 4, "inverse-square-root"),
        lambda n: 0.1 if n > 4 else max(n, 1) ** -0.5,
    ),
    "WSD": (
        LrSchedule(1.0, 0.2, 0, 4, "WSD", wsd_decay_steps=2, lr_wsd_decay_style="linear"),
        lambda n: 0.2 + 0.8 * (1 - min(max(n - 2, 0), 2) / 2),
    ),
}


@pytest.mark.parametrize("style", STYLES)
def test_each_style_is_its_formula(style: str) -> None:
    schedule, formula = STYLES[style]
    assert rates(schedule, 7) == pytest.approx([formula(number) for number in range(7)])


def test_the_warm_up_goes_from_the_first_rate_to_the_largest() -> None:
    warm = msgspec.structs.replace(COSINE, init_lr=0.004, lr_warmup_steps=3)
    assert rates(warm, 4) == pytest.approx([0.004, 0.006, 0.008, 0.01])


def test_a_step_without_a_rate_is_the_step_with_the_rate_of_its_number(base: Base, ranks: Ranks) -> None:
    by_schedule, by_hand = fresh(base, COSINE), fresh(base, None)
    for number, rate in enumerate(rates(COSINE, 8)):
        done = stepped(base, by_schedule, ranks)
        assert (done.metrics["learning_rate"], done.iteration) == (rate, number + 1)
        stepped(base, by_hand, ranks, (), learning_rate=rate)
    assert snapshot(by_schedule) == snapshot(by_hand)
    stepped(base, by_schedule, ranks)
    stepped(base, by_hand, ranks, (), learning_rate=0.002)
    assert snapshot(by_schedule) != snapshot(by_hand)


def test_a_rate_that_is_given_is_taken_and_its_step_counts_all_the_same(base: Base, ranks: Ranks) -> None:
    slot = fresh(base, COSINE)
    assert stepped(base, slot, ranks, (), learning_rate=0.5).metrics["learning_rate"] == 0.5
    assert slot.optimizer.last_params is not None
    assert slot.optimizer.last_params.weight_decay == ADAM["weight_decay"]
    assert stepped(base, slot, ranks).metrics["learning_rate"] == rates(COSINE, 2)[1]


def test_a_step_that_is_skipped_does_not_count(base: Base, ranks: Ranks) -> None:
    slot = fresh(base, COSINE)
    stepped(base, slot, ranks)
    forward_backward(base, slot, ranks, forward_backward_command(overflowing()))
    skipped = optim_step(slot, ranks, msgspec.structs.replace(optim_command(ADAM), scheduled=BOTH))
    assert skipped.metrics["skipped_non_finite"] == 1.0
    assert stepped(base, slot, ranks).metrics["learning_rate"] == rates(COSINE, 2)[1]


def test_a_step_that_nobody_gives_a_rate_is_refused_and_changes_nothing(base: Base, ranks: Ranks) -> None:
    slot = fresh(base, None)
    forward_backward(base, slot, ranks, forward_backward_command(DATA))
    before = snapshot(slot)
    with pytest.raises(CommandFailed, match="learning_rate is missing") as failure:
        optim_step(slot, ranks, msgspec.structs.replace(optim_command(ADAM), scheduled=BOTH))
    assert failure.value.kind is ErrorKind.BAD_COMMAND
    assert snapshot(slot) == before
    assert slot.optimizer.has_gradients


def test_the_weight_decay_is_scheduled_where_the_schedule_says_so(base: Base, ranks: Ranks) -> None:
    decaying = msgspec.structs.replace(COSINE, start_wd=0.1, end_wd=0.3, wd_incr_steps=2, wd_incr_style="linear")
    slot, taken = fresh(base, decaying), []
    for given in (BOTH, BOTH, BOTH, ("learning_rate",)):
        stepped(base, slot, ranks, given, weight_decay=0.7)  # type: ignore[arg-type]
        assert slot.optimizer.last_params is not None
        taken.append(slot.optimizer.last_params.weight_decay)
    assert taken == pytest.approx([0.1, 0.2, 0.3, 0.7])
    plain = fresh(base, COSINE)
    stepped(base, plain, ranks, weight_decay=0.7)
    assert plain.optimizer.last_params is not None
    assert plain.optimizer.last_params.weight_decay == 0.7


@pytest.mark.parametrize("style", STYLES)
def test_the_numbers_of_a_checkpoint_bring_the_very_rates_back(style: str) -> None:
    scheduler = LrScheduler(STYLES[style][0])
    for _ in range(7):
        again = read_scheduler(json.loads(json.dumps(scheduler.state())))
        assert again.state() == scheduler.state()
        for one in (scheduler, again):
            one.advance()
        assert again.learning_rate == scheduler.learning_rate


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_lr": math.nan}, "max_lr"),
        ({"min_lr": -0.1}, "min_lr"),
        ({"init_lr": 0.02}, "init_lr"),
        ({"min_lr": 0.02}, "min_lr"),
        ({"lr_warmup_steps": 6}, "warmup_steps"),
        ({"lr_decay_steps": 0}, "decay_steps"),
        ({"lr_decay_style": "WSD"}, "wsd_decay_steps"),
        ({"lr_decay_style": "WSD", "wsd_decay_steps": 5, "lr_wsd_decay_style": "linear"}, "wsd_decay_steps"),
        ({"wsd_decay_steps": 3}, "WSD"),
        ({"start_wd": 0.1}, "end_wd"),
        ({"start_wd": 0.2, "end_wd": 0.1, "wd_incr_steps": 3, "wd_incr_style": "linear"}, "end_wd"),
        ({"start_wd": 0.1, "end_wd": 0.2, "wd_incr_steps": 3, "wd_incr_style": "constant"}, "constant"),
        ({"start_wd": 0.1, "end_wd": 0.2, "wd_incr_style": "linear"}, "wd_incr_steps"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused_by_name(base: Base, change: dict[str, Any], named: str) -> None:
    table = SlotTable(base, 1, 8)
    with pytest.raises(CommandFailed, match=named) as failure:
        table.create("one", SPEC, 1, msgspec.structs.replace(COSINE, **change))
    assert failure.value.kind is ErrorKind.BAD_COMMAND
    assert table.resident() == ()


@pytest.mark.parametrize(
    "change", [{"num_steps": -1}, {"num_steps": 1.5}, {"lr_decay_style": "square"}, {"surplus": 1}, {"max_lr": "much"}]
)
def test_numbers_that_are_no_schedulers_are_a_damaged_checkpoint(change: dict[str, Any]) -> None:
    with pytest.raises(CommandFailed, match=next(iter(change))) as failure:
        read_scheduler({**LrScheduler(COSINE).state(), **change})
    assert failure.value.kind is ErrorKind.CHECKPOINT_CORRUPT
