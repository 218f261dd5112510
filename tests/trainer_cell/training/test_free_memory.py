"""A pass that cannot fit is refused before it begins, on every rank alike, and nothing is changed."""

from __future__ import annotations

import pytest
import torch

from tests.trainer_cell.training.arithmetic import batches
from tests.trainer_cell.training.snapshots import snapshot
from tests.trainer_cell.training.test_step import DATA, trained
from tests.trainer_cell.training.wire import forward_backward_command
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.ranks import Ranks
from trainer_cell.training import memory
from trainer_cell.training.build import Base
from trainer_cell.training.step import forward_backward

CPU = torch.device("cpu")


def test_there_is_memory_on_this_machine() -> None:
    assert memory.free_bytes(CPU) > 64 << 20


def test_what_cannot_fit_is_refused_and_leaves_the_slot_as_it_was(
    base: Base, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = trained(base, ranks)
    before = snapshot(slot)
    long = batches(512, 1, (400,))[0]
    monkeypatch.setattr(memory, "free_bytes", lambda device: 500_000)
    with pytest.raises(CommandFailed) as failure:
        forward_backward(base, slot, ranks, forward_backward_command(long))
    assert failure.value.kind is ErrorKind.OUT_OF_MEMORY
    assert "a row of 400 tokens" in failure.value.message
    assert snapshot(slot) == before
    # The same memory does for what is shorter, and for a pass that keeps nothing.
    forward_backward(base, slot, ranks, forward_backward_command(DATA))
    forward_backward(base, slot, ranks, forward_backward_command(long, forward_only=True))
