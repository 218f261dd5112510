"""The models a fake cell holds, and what each command does to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from tests.fakes.fake_model import FakeModel
from tests.fakes.fake_vault import load_model, save_model
from trainer_cell.protocol.commands import (
    AdapterSpec,
    CreateModel,
    DiscardGradients,
    ForgetModels,
    ForwardBackward,
    FreeModel,
    LoadState,
    ModelCommand,
    OptimStep,
    SaveState,
)
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import (
    GradientsDiscarded,
    Hello,
    ModelCreated,
    ModelFreed,
    ModelsForgotten,
    Progress,
    StateLoaded,
    Success,
)
from trainer_cell.vault.layout import Vault

_CHANGING = (CreateModel, LoadState, ForwardBackward, OptimStep, DiscardGradients)


class FakeSlots:
    def __init__(self, vault: Vault, hello: Hello) -> None:
        self.models: dict[str, FakeModel] = {}
        self._vault = vault
        self._hello = hello

    def execute(self, command: ModelCommand | ForgetModels, report: Callable[[Progress], None]) -> Success:
        """Raises `CommandFailed` with nothing changed."""
        outcome = self._execute(command, report)
        if isinstance(command, _CHANGING) and not getattr(command, "forward_only", False):
            self.model(command).turn = command.turn
        return outcome

    def _execute(self, command: ModelCommand | ForgetModels, report: Callable[[Progress], None]) -> Success:
        match command:
            case CreateModel():
                self._take_slot(command.model_id)
                self.models[command.model_id] = FakeModel.fresh(command.adapter, command.seed)
                return ModelCreated(command.command_id, num_parameters=command.adapter.rank)
            case FreeModel():
                was_resident = self.models.pop(command.model_id, None) is not None
                return ModelFreed(command.command_id, was_resident)
            case ForgetModels():
                foreign = self.models.keys() - set(command.keep)
                for model_id in foreign:
                    del self.models[model_id]
                return ModelsForgotten(command.command_id, len(foreign))
            case ForwardBackward():
                return self.model(command).forward_backward(command, self._hello.base_model.vocab_size)
            case OptimStep():
                return self.model(command).optim_step(command)
            case DiscardGradients():
                self.model(command).pending = 0.0
                return GradientsDiscarded(command.command_id)
            case SaveState():
                report(Progress(command.command_id, "capturing", 0, 0))
                return save_model(self._vault, self._hello, self.model(command), command, report)
            case LoadState():
                return self._load(command)

    def _load(self, command: LoadState) -> StateLoaded:
        live = self.models.get(command.model_id)
        if live is not None:
            _check_adapter(command.adapter, live.adapter)
        else:
            self._take_slot(command.model_id)
        model, with_optimizer = load_model(self._vault, self._hello, command)
        self.models[command.model_id] = model
        reason: Literal["not_requested", "no_load_optim"] | None = None
        if not with_optimizer:
            reason = "no_load_optim" if self._hello.no_load_optim and command.obeys_flags else "not_requested"
        return StateLoaded(command.command_id, model.step, model.iteration, with_optimizer, False, reason)

    def _take_slot(self, model_id: str) -> None:
        if model_id in self.models:
            raise CommandFailed(ErrorKind.MODEL_EXISTS, f"model {model_id} is resident already")
        if len(self.models) >= self._hello.slots:
            raise CommandFailed(ErrorKind.NO_FREE_SLOT, "no slot is free")

    def model(self, command: ModelCommand) -> FakeModel:
        if command.model_id not in self.models:
            raise CommandFailed(ErrorKind.UNKNOWN_MODEL, f"model {command.model_id} is not resident")
        return self.models[command.model_id]


def _check_adapter(stored: AdapterSpec, live: AdapterSpec) -> None:
    if stored != live:
        raise CommandFailed(ErrorKind.CHECKPOINT_INCOMPATIBLE, "the adapter of the checkpoint is another")
