"""A pass that cannot fit is refused before it begins, on every rank alike, and nothing is changed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
from trainer_cell.training.recompute import RecomputedLayer
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


def base_of(layers: list[object], pipeline: int) -> Any:
    model = SimpleNamespace(decoder=SimpleNamespace(layers=layers))
    shape, layout = SimpleNamespace(hidden=16), SimpleNamespace(pipeline=pipeline)
    return SimpleNamespace(model=model, shape=shape, dtype=torch.float32, layout=layout)


def rows_of(*lengths: int) -> Any:
    return [SimpleNamespace(lengths=(length,)) for length in lengths]


def test_as_many_rows_as_are_in_the_air_at_once_are_counted() -> None:
    one = memory.least_bytes(base_of([object()], 1), rows_of(10))
    assert memory.least_bytes(base_of([object()], 1), rows_of(5, 10, 7)) == one
    assert 10 * memory.least_bytes(base_of([object()], 2), rows_of(5, 10, 7)) == 17 * one
    assert memory.least_bytes(base_of([object()], 2), rows_of()) == 0


def test_a_layer_that_is_recomputed_keeps_its_input_alone() -> None:
    recomputed = RecomputedLayer.__new__(RecomputedLayer)
    assert memory.least_bytes(base_of([recomputed], 1), rows_of(10)) == 10 * 16 * 4
    assert memory.least_bytes(base_of([object()], 1), rows_of(10)) > 10 * 16 * 4


@pytest.mark.parametrize(("limit", "is_less"), [("max", False), ("1048576", True)])
def test_the_limit_of_the_process_s_control_group_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, is_less: bool
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("48576\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert (memory.free_bytes(CPU) == 1_000_000) == is_less
