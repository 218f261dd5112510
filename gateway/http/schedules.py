"""Learning rates in plain REST: given with a step, or by a schedule that the model carries."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gateway.http import wire
from gateway.http.bodies import Body
from gateway.scheduling.requests import OptimStepRequest
from trainer_cell.protocol.commands import AdamParams, LrSchedule, Rate

Steps = Annotated[int, Field(ge=0, le=2**53)]


class Schedule(Body):
    """The learning rate goes from init_lr to max_lr over warmup_steps, then in decay_style to min_lr, where it is after
    decay_steps, the warm-up included. The step after n steps takes the rate of n.

    WSD stays at max_lr until its last wsd_decay_steps. start_wd, end_wd, wd_incr_style (and wd_incr_steps, unless it is
    constant) schedule the weight decay too.
    """

    max_lr: wire.Rate
    min_lr: wire.Rate = 0.0
    init_lr: wire.Rate = 0.0
    warmup_steps: Steps = 0
    decay_steps: Annotated[int, Field(ge=1, le=2**53)]
    decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
    wsd_decay_steps: Steps | None = None
    wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] | None = None
    start_wd: wire.Rate | None = None
    end_wd: wire.Rate | None = None
    wd_incr_steps: Steps | None = None
    wd_incr_style: Literal["constant", "linear", "cosine"] | None = None

    def as_schedule(self) -> LrSchedule:
        return LrSchedule(
            max_lr=self.max_lr,
            min_lr=self.min_lr,
            init_lr=self.init_lr,
            lr_warmup_steps=self.warmup_steps,
            lr_decay_steps=self.decay_steps,
            lr_decay_style=self.decay_style,
            wsd_decay_steps=self.wsd_decay_steps,
            lr_wsd_decay_style=self.wsd_decay_style,
            start_wd=self.start_wd,
            end_wd=self.end_wd,
            wd_incr_steps=self.wd_incr_steps,
            wd_incr_style=self.wd_incr_style,
        )


class Step(Body):
    """Without a learning_rate the model's lr_scheduler gives it, and without a weight_decay that too, if it has one."""

    learning_rate: wire.Rate | None = None
    beta1: wire.Beta = 0.9
    beta2: wire.Beta = 0.95
    eps: wire.Eps = 1e-12
    weight_decay: wire.Rate | None = None
    grad_clip_norm: wire.Norm = 0.0

    def as_request(self) -> OptimStepRequest:
        given = self.model_dump()
        rates: tuple[Rate, ...] = ("learning_rate", "weight_decay")
        missing = tuple(rate for rate in rates if given[rate] is None)
        return OptimStepRequest(AdamParams(**given | dict.fromkeys(missing, 0.0)), missing)
