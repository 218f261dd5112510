"""A model as clients see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from trainer_cell.protocol.commands import AdapterSpec, LrSchedule
from trainer_cell.protocol.errors import CommandFailed

ModelState = Literal["creating", "ready", "lost", "failed", "unloaded"]


@dataclass
class Model:
    """One client's adapter and its training state.

    base_model / adapter: None only while a model made from a checkpoint is still `creating`, or failed so.
    seed / lr_schedule: of the fresh adapter; None when the model was made from a checkpoint.
    state: `lost` is a model whose state could not be brought back into a cell; its last snapshot is on disk.
    trouble: why the model is `lost` or `failed`.
    base_digest: of the base weights its state is a state of; None until it is made.
    number: its place among all models, in the order in which they were made.
    step: Adam's step; iteration: optimizer steps in the model's life, loads included. Both as of the last outcome.
    pending: accepted commands without an answer.
    """

    model_id: str
    session_id: str
    tenant: str
    base_model: str | None
    adapter: AdapterSpec | None
    seed: int | None
    user_metadata: dict[str, str]
    lr_schedule: LrSchedule | None = None
    base_digest: str | None = None
    number: int = 0
    state: ModelState = "creating"
    trouble: CommandFailed | None = None
    step: int = 0
    iteration: int = 0
    pending: int = 0
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    last_request_time: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def is_over(self) -> bool:
        """Whether no further command of this model will ever run."""
        return self.state in ("failed", "unloaded")
