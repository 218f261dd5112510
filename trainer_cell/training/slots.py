"""Where models are resident in this cell. A slot is made when a model comes and costs nothing before."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch

from trainer_cell.protocol.commands import AdapterSpec, LrSchedule
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.training.adapter import Adapter, target_modules
from trainer_cell.training.build import Base
from trainer_cell.training.lr_schedule import LrScheduler
from trainer_cell.training.optimizer import SlotOptimizer


@dataclass(frozen=True)
class SlotState:
    """The live tensors of a slot by PEFT name, in the adapter's order: writing into them changes the slot.

    weight has the base model's dtype, the others are float32; in FP32 master and weight are the same storage.
    """

    weight: dict[str, torch.Tensor]
    master: dict[str, torch.Tensor]
    exp_avg: dict[str, torch.Tensor]
    exp_avg_sq: dict[str, torch.Tensor]


@dataclass(eq=False)
class Slot:
    """A resident model: its adapter and its optimizer. turn: of the last command that changed it."""

    model_id: str
    spec: AdapterSpec
    adapter: Adapter
    optimizer: SlotOptimizer
    turn: int = 0

    @property
    def num_parameters(self) -> int:
        return self.adapter.num_parameters

    def flat(self, part: str) -> torch.Tensor:
        """The live buffer of `weight`, `master`, `exp_avg` or `exp_avg_sq`, laid out as `Adapter.begin` says."""
        return self.adapter.flat if part == "weight" else getattr(self.optimizer, part)

    def state(self) -> SlotState:
        views, optimizer = self.adapter.views, self.optimizer
        return SlotState(
            weight=views(self.adapter.flat),
            master=views(optimizer.master),
            exp_avg=views(optimizer.exp_avg),
            exp_avg_sq=views(optimizer.exp_avg_sq),
        )


class SlotTable:
    """The resident models of one rank, at most `limit`; every rank holds the same in the same order."""

    def __init__(self, base: Base, limit: int, max_rank: int) -> None:
        self._base, self._limit, self._max_rank = base, limit, max_rank
        self._slots: dict[str, Slot] = {}

    def create(self, model_id: str, spec: AdapterSpec, seed: int, lr_schedule: LrSchedule | None = None) -> Slot:
        """Make a model resident with a fresh adapter. Raises `CommandFailed`, with nothing changed."""
        if self.is_resident(model_id):
            raise CommandFailed(ErrorKind.MODEL_EXISTS, f"model {model_id} is resident already")
        self._check_spec(spec)
        if len(self._slots) >= self._limit:
            raise CommandFailed(ErrorKind.NO_FREE_SLOT, f"all {self._limit} slots are taken")
        scheduler = None if lr_schedule is None else LrScheduler(lr_schedule)
        adapter = Adapter(self._base, spec)
        optimizer = SlotOptimizer(adapter, scheduler)
        optimizer.master.copy_(adapter.initialise(seed))
        self._slots[model_id] = slot = Slot(model_id, spec, adapter, optimizer)
        return slot

    def get(self, model_id: str) -> Slot:
        slot = self._slots.get(model_id)
        if slot is None:
            raise CommandFailed(ErrorKind.UNKNOWN_MODEL, f"model {model_id} is not resident")
        return slot

    def is_resident(self, model_id: str) -> bool:
        return model_id in self._slots

    def free(self, model_id: str) -> bool:
        """Give the slot away; says whether the model was resident."""
        return self._slots.pop(model_id, None) is not None

    def resident(self) -> tuple[Slot, ...]:
        return tuple(self._slots.values())

    def _check_spec(self, spec: AdapterSpec) -> None:
        if not 1 <= spec.rank <= self._max_rank:
            raise CommandFailed(ErrorKind.BAD_COMMAND, f"rank is {spec.rank}: it must be 1 to {self._max_rank}")
        if not (isfinite(spec.alpha) and spec.alpha > 0):
            raise CommandFailed(ErrorKind.BAD_COMMAND, f"alpha is {spec.alpha}: it must be finite and positive")
        if not target_modules(spec):
            raise CommandFailed(ErrorKind.BAD_COMMAND, "one of train_attn, train_mlp and train_unembed must be true")
