"""A model's own learning rates: Megatron's `OptimizerParamScheduler` over the count of the model's steps.

Its state is a handful of plain numbers, the same on every rank and under every layout.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import isfinite
from types import SimpleNamespace

import msgspec
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from trainer_cell.protocol.commands import AdamParams, LrSchedule, Rate
from trainer_cell.protocol.errors import CommandFailed, ErrorKind

SchedulerState = dict[str, float | int | str | bool]

_COUNT = "num_steps"
_OF_WEIGHT_DECAY = ("start_wd", "end_wd", "wd_incr_steps", "wd_incr_style")
_LARGEST_COUNT = 2**53


class LrScheduler:
    """What the next step's rates are. Raises `CommandFailed` (BAD_COMMAND) for a schedule that makes no sense.

    num_steps: how many steps are behind.
    """

    def __init__(self, schedule: LrSchedule, num_steps: int = 0) -> None:
        if problem := _problem(schedule):
            raise CommandFailed(ErrorKind.BAD_COMMAND, f"lr_scheduler: {problem}")
        self._schedule = schedule
        # Megatron's class writes the rates of the next step into its optimizer's groups; here there is one.
        self._rates: dict[str, float] = {}
        self._megatron = OptimizerParamScheduler(
            SimpleNamespace(param_groups=[self._rates]),
            init_lr=schedule.init_lr,
            max_lr=schedule.max_lr,
            min_lr=schedule.min_lr,
            lr_warmup_steps=schedule.lr_warmup_steps,
            lr_decay_steps=schedule.lr_decay_steps,
            lr_decay_style=schedule.lr_decay_style,
            start_wd=schedule.start_wd or 0.0,
            end_wd=schedule.end_wd or 0.0,
            wd_incr_steps=schedule.wd_incr_steps or 0,
            wd_incr_style=schedule.wd_incr_style or "constant",
            wsd_decay_steps=schedule.wsd_decay_steps,
            lr_wsd_decay_style=schedule.lr_wsd_decay_style,
        )
        self._megatron.step(num_steps)

    @property
    def learning_rate(self) -> float:
        return float(self._rates["lr"])

    @property
    def weight_decay(self) -> float | None:
        """None where the schedule has none."""
        return None if self._schedule.start_wd is None else float(self._rates["weight_decay"])

    def advance(self) -> None:
        """A step was applied."""
        self._megatron.step(1)

    def state(self) -> SchedulerState:
        """What `read_scheduler` makes the same scheduler of."""
        fields = msgspec.structs.asdict(self._schedule)
        return {name: value for name, value in fields.items() if value is not None} | {_COUNT: self._megatron.num_steps}


def read_scheduler(state: Mapping[str, float | int | str | bool]) -> LrScheduler:
    """Of a checkpoint's manifest. Raises `CommandFailed` (CHECKPOINT_CORRUPT) naming the field."""
    fields = dict(state)
    count = fields.pop(_COUNT, None)
    try:
        if type(count) is not int or not 0 <= count <= _LARGEST_COUNT:
            raise msgspec.ValidationError(f"{_COUNT} is {count}")
        return LrScheduler(msgspec.convert(fields, LrSchedule), count)
    except (msgspec.ValidationError, CommandFailed) as problem:
        raise CommandFailed(ErrorKind.CHECKPOINT_CORRUPT, f"manifest.json: scheduler: {problem}") from problem


def scheduled(adam: AdamParams, rates: Collection[Rate], scheduler: LrScheduler | None) -> AdamParams:
    """`adam` with those rates from the schedule. Raises `CommandFailed` (BAD_COMMAND) where no schedule gives the
    learning rate."""
    if "learning_rate" in rates:
        if scheduler is None:
            raise CommandFailed(
                ErrorKind.BAD_COMMAND, "learning_rate is missing, and the model has no lr_scheduler to take it from"
            )
        adam = msgspec.structs.replace(adam, learning_rate=scheduler.learning_rate)
    if "weight_decay" in rates and scheduler is not None and scheduler.weight_decay is not None:
        adam = msgspec.structs.replace(adam, weight_decay=scheduler.weight_decay)
    return adam


def _problem(schedule: LrSchedule) -> str | None:
    """What Megatron's class would raise bare assertions or stumble over at some later step; None if it is fine."""
    for name, value in msgspec.structs.asdict(schedule).items():
        if isinstance(value, int | float) and not (isfinite(value) and 0 <= value <= _LARGEST_COUNT):
            return f"{name} is {value}: it must be finite and not negative"
    if schedule.init_lr > schedule.max_lr or schedule.min_lr > schedule.max_lr:
        return f"init_lr {schedule.init_lr} and min_lr {schedule.min_lr} must not be over max_lr {schedule.max_lr}"
    if not schedule.lr_warmup_steps < schedule.lr_decay_steps:
        return f"warmup_steps {schedule.lr_warmup_steps} must be below decay_steps {schedule.lr_decay_steps}"
    return _wsd_problem(schedule) or _weight_decay_problem(schedule)


def _wsd_problem(schedule: LrSchedule) -> str | None:
    given = (schedule.wsd_decay_steps, schedule.lr_wsd_decay_style)
    if schedule.lr_decay_style != "WSD":
        return None if given == (None, None) else "wsd_decay_steps and wsd_decay_style belong to the decay_style WSD"
    if schedule.wsd_decay_steps is None or schedule.lr_wsd_decay_style is None:
        return "WSD needs wsd_decay_steps and wsd_decay_style"
    longest = schedule.lr_decay_steps - schedule.lr_warmup_steps
    if not 1 <= schedule.wsd_decay_steps <= longest:
        return f"wsd_decay_steps is {schedule.wsd_decay_steps}: it must be 1 to {longest}"
    return None


def _weight_decay_problem(schedule: LrSchedule) -> str | None:
    start, end, steps, style = (getattr(schedule, name) for name in _OF_WEIGHT_DECAY)
    if (start, end, steps, style) == (None, None, None, None):
        return None
    if start is None or end is None or style is None:
        return "start_wd, end_wd and wd_incr_style go together"
    if end < start:
        return f"end_wd {end} must not be below start_wd {start}"
    if style == "constant":
        return None if start == end else "a constant weight decay has one value for start_wd and end_wd"
    return None if steps else "wd_incr_steps is missing"
