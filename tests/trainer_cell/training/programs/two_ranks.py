"""The corners of data parallelism: `main(DIRECTORY)` on two ranks. A broken promise is an AssertionError."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from tests.trainer_cell.training.arithmetic import ADAM, Datum, batches
from tests.trainer_cell.training.snapshots import Snapshot, snapshot
from tests.trainer_cell.training.test_inputs import BAD_DATA
from tests.trainer_cell.training.wire import forward_backward_command, logprobs_of, optim_command
from trainer_cell.protocol.commands import AdapterSpec
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import Layout
from trainer_cell.ranks import Ranks
from trainer_cell.training.build import Base, build_base, start_parallel
from trainer_cell.training.slots import Slot, SlotTable
from trainer_cell.training.step import forward_backward, optim_step

SPEC = AdapterSpec(4, 8.0, train_attn=True, train_mlp=True, train_unembed=True)
DATA = batches(512, 1, (9, 3, 30, 1))[0]


def new_slot(base: Base, ranks: Ranks) -> Slot:
    slot = SlotTable(base, 1, 8).create("one", SPEC, seed=1)
    forward_backward(base, slot, ranks, forward_backward_command(DATA))
    optim_step(slot, ranks, optim_command(ADAM))
    return slot


def refused(ranks: Ranks, attempt: Callable[[], object]) -> CommandFailed:
    """The failure, which must be the same on both ranks."""
    try:
        attempt()
    except CommandFailed as failure:
        first, second = ranks.gather((failure.kind, failure.message))
        assert first == second
        return failure
    raise AssertionError("it was not refused")


def everywhere(ranks: Ranks, slot: Slot) -> Snapshot:
    """The slot's state, which must be the same bits on both ranks once the gradients are gone."""
    first, second = ranks.gather(snapshot(slot))
    assert first == second
    return first


def a_rank_without_sequences(base: Base, ranks: Ranks) -> None:
    slot = new_slot(base, ranks)
    done = forward_backward(base, slot, ranks, forward_backward_command(DATA[:1]))
    assert len(logprobs_of(done)[0]) == 9
    assert slot.optimizer.has_gradients
    gradient = slot.optimizer.gradient
    assert gradient is not None
    assert bool(gradient.any()) == (ranks.rank == 0)
    assert optim_step(slot, ranks, optim_command(ADAM)).metrics["grad_norm"] > 0
    everywhere(ranks, slot)


def answers_come_in_the_order_of_the_data(base: Base, ranks: Ranks) -> None:
    slot = new_slot(base, ranks)
    forward = forward_backward(base, slot, ranks, forward_backward_command(DATA, forward_only=True))
    backward = forward_backward(base, slot, ranks, forward_backward_command(DATA[::-1], forward_only=True))
    for one, other in zip(logprobs_of(forward), reversed(logprobs_of(backward)), strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def bad_data_is_refused_on_both_and_changes_nothing(base: Base, ranks: Ranks) -> None:
    slot = new_slot(base, ranks)
    before = everywhere(ranks, slot)
    bad = BAD_DATA["NaN weight"][0]()
    failure = refused(ranks, lambda: forward_backward(base, slot, ranks, forward_backward_command([*DATA, bad])))
    assert failure.kind is ErrorKind.BAD_COMMAND
    assert everywhere(ranks, slot) == before


def one_failing_rank_is_named_and_nothing_is_kept(base: Base, ranks: Ranks) -> None:
    slot = new_slot(base, ranks)
    before = everywhere(ranks, slot)

    def fail(*_: object) -> None:
        raise MemoryError("no memory is left")

    hook = base.model.decoder.layers[1].register_forward_hook(fail) if ranks.rank == 1 else None
    failure = refused(ranks, lambda: forward_backward(base, slot, ranks, forward_backward_command(DATA)))
    if hook is not None:
        hook.remove()
    assert failure.kind is ErrorKind.RANK_FAILED
    assert "rank 1" in failure.message
    assert everywhere(ranks, slot) == before
    assert refused(ranks, lambda: optim_step(slot, ranks, optim_command(ADAM))).kind is ErrorKind.NO_GRADIENTS
    forward_backward(base, slot, ranks, forward_backward_command(DATA))
    optim_step(slot, ranks, optim_command(ADAM))
    assert everywhere(ranks, slot) != before


def non_finite_gradients_of_one_rank_stop_the_step_of_both(base: Base, ranks: Ranks) -> None:
    slot = new_slot(base, ranks)
    before = everywhere(ranks, slot)
    large = Datum(DATA[0].tokens, DATA[0].targets, torch.full_like(DATA[0].weights, 3e38))
    forward_backward(base, slot, ranks, forward_backward_command([large]))
    assert optim_step(slot, ranks, optim_command(ADAM)).metrics["skipped_non_finite"] == 1.0
    assert everywhere(ranks, slot) == before


def the_same_commands_give_the_same_bits(base: Base, ranks: Ranks) -> None:
    assert everywhere(ranks, new_slot(base, ranks)) == everywhere(ranks, new_slot(base, ranks))


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    two = Layout(world=2, tensor=1, pipeline=1, data=2)
    start_parallel(two)
    both = Ranks()
    cell = build_base(directory, two, torch.device("cpu"), torch.float32)
    a_rank_without_sequences(cell, both)
    answers_come_in_the_order_of_the_data(cell, both)
    bad_data_is_refused_on_both_and_changes_nothing(cell, both)
    one_failing_rank_is_named_and_nothing_is_kept(cell, both)
    non_finite_gradients_of_one_rank_stop_the_step_of_both(cell, both)
    the_same_commands_give_the_same_bits(cell, both)
    dist.barrier()
    dist.destroy_process_group()
