"""Makes one rank raise at one step of a command, or stand still there, while a fault file asks for it.

The file holds `{"rank": r, "at": step, "how": …}`: `raises`, `raises typed`, `stands still`, or `stops` (the whole
process, as SIGSTOP does). `install` is given to a `RunningCell` as its `disturb`.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer_cell.protocol.errors import CommandFailed, ErrorKind

# By name, module and attribute. What comes before a command's first collective, or is agreed on, is one typed failure.
AGREED = {
    "create": ("trainer_cell.training.slots", "SlotTable.create"),
    "validate": ("trainer_cell.training.step", "read_sequences"),
    "pack": ("trainer_cell.training.step", "pack"),
    "check the step": ("trainer_cell.training.step", "check_adam"),
    "capture": ("trainer_cell.checkpoint.capture", "SaveBuffer.capture"),
    "write": ("trainer_cell.checkpoint.publication", "write_image"),
    "read": ("trainer_cell.checkpoint.slot_reader", "SlotReader.read"),
}
# Where other ranks wait or have gone on already.
ENDING = {
    "forward": ("trainer_cell.training.attention", "PackedAttention.forward"),
    "loss": ("trainer_cell.training.output_head", "OutputHead.target_logprobs"),
    "backward": ("trainer_cell.training.gradients", "_Mover.__call__"),
    "accumulate": ("trainer_cell.training.optimizer", "SlotOptimizer.accumulate"),
    "sum gradients": ("trainer_cell.training.optimizer", "SlotOptimizer._sum_over_ranks"),
    "norm": ("trainer_cell.training.optimizer", "SlotOptimizer._global_norm"),
    "step": ("trainer_cell.training.optimizer", "SlotOptimizer._adam_step"),
    "plan": ("trainer_cell.checkpoint.plan", "PlanCache.plan"),
    "vote": ("trainer_cell.checkpoint.vote", "Booth.cast"),
    "count the votes": ("trainer_cell.checkpoint.vote", "Booth.collect"),
    "apply": ("trainer_cell.checkpoint.load", "_apply"),
}


@contextmanager
def fault(file: Path, rank: int, at: str, how: str = "raises") -> Iterator[None]:
    # Whole or not at all: a rank may still be at the end of the command before, which another has answered.
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps({"rank": rank, "at": at, "how": how}))
    draft.replace(file)
    try:
        yield
    finally:
        file.unlink()


def install(file: Path, rank: int) -> None:
    for at, (module, attribute) in {**AGREED, **ENDING}.items():
        owner: Any = importlib.import_module(module)
        *classes, name = attribute.split(".")
        for part in classes:
            owner = getattr(owner, part)
        is_static = isinstance(vars(owner)[name], staticmethod)
        faulty = _faulty(file, rank, at, getattr(owner, name))
        setattr(owner, name, staticmethod(faulty) if is_static else faulty)


def _faulty(file: Path, rank: int, at: str, act: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(act)
    def faulty(*arguments: Any, **named: Any) -> Any:
        if file.exists():
            asked = json.loads(file.read_text())
            if (asked["rank"], asked["at"]) == (rank, at):
                if asked["how"] == "stops":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if asked["how"] == "stands still":
                    time.sleep(3600)
                if asked["how"] == "raises typed":
                    raise CommandFailed(ErrorKind.NON_FINITE_STATE, f"no memory to {at}")
                raise MemoryError(f"no memory to {at}")
        return act(*arguments, **named)

    return faulty
