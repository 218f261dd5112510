"""One model of a running cell, as a test drives it: commands in, outcomes and checkpoints out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests.service.state import State, read_state
from tests.trainer_cell.running_cell import RunningCell
from tests.trainer_cell.training.arithmetic import ADAM, Datum
from tests.trainer_cell.training.wire import forward_backward_command
from trainer_cell.protocol.commands import (
    AdamParams,
    AdapterSpec,
    CreateModel,
    ForwardBackward,
    FreeModel,
    LoadState,
    LrSchedule,
    OptimStep,
    SaveState,
)
from trainer_cell.protocol.outcomes import (
    ForwardBackwardDone,
    ModelCreated,
    ModelFreed,
    OptimStepDone,
    StateLoaded,
    StateSaved,
)

_numbers = itertools.count()


class Client:
    """model_id: of the wire's form; everything must succeed."""

    def __init__(self, cell: RunningCell, model_id: str, spec: AdapterSpec) -> None:
        self.cell, self.model_id, self.spec = cell, model_id, spec

    def create(self, seed: int, lr_schedule: LrSchedule | None = None) -> ModelCreated:
        return self.cell.do(CreateModel(new_id(), self.model_id, self.spec, seed, lr_schedule), ModelCreated)

    def train(self, data: Sequence[Datum]) -> ForwardBackwardDone:
        """One forward_backward and one optim_step; what the former said."""
        done = self.cell.do(self.forward_backward(data), ForwardBackwardDone)
        self.cell.do(self.optim_step(), OptimStepDone)
        return done

    def train_as_scheduled(self, data: Sequence[Datum]) -> float:
        """As `train`, at the model's own learning rate; which one that was."""
        self.cell.do(self.forward_backward(data), ForwardBackwardDone)
        step = msgspec.structs.replace(self.optim_step(), scheduled=("learning_rate", "weight_decay"))
        return self.cell.do(step, OptimStepDone).metrics["learning_rate"]

    def save(self, root: Path, name: str) -> State:
        self.cell.do(self.save_command(name), StateSaved)
        return read_state(root, f"tinker://{self.model_id}/weights/{name}")

    def load(self, version: str, load_optimizer: bool = True) -> StateLoaded:
        return self.cell.do(self.load_command(version, load_optimizer), StateLoaded)

    def free(self) -> None:
        self.cell.do(FreeModel(new_id(), self.model_id), ModelFreed)

    def forward_backward(self, data: Sequence[Datum]) -> ForwardBackward:
        command = forward_backward_command(data)
        return msgspec.structs.replace(command, command_id=new_id(), model_id=self.model_id)

    def optim_step(self) -> OptimStep:
        return OptimStep(new_id(), self.model_id, AdamParams(**ADAM))

    def save_command(self, name: str) -> SaveState:
        return SaveState(
            new_id(),
            self.model_id,
            name=name,
            kind="weights",
            overwrite=True,
            include_optimizer=True,
            tenant_digest="tenant",
            created="2026-01-01T00:00:00Z",
            expires=None,
            user_metadata={},
        )

    def load_command(self, version: str, load_optimizer: bool = True) -> LoadState:
        return LoadState(new_id(), self.model_id, version, self.spec, load_optimizer)


def new_id() -> str:
    return f"command-{next(_numbers)}"
