from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from tests.trainer_cell.training.arithmetic import ADAM, Datum, batches
from tests.trainer_cell.training.snapshots import snapshot
from tests.trainer_cell.training.test_inputs import BAD_DATA
from tests.trainer_cell.training.wire import forward_backward_command, logprobs_of, optim_command, wire_datum
from trainer_cell.protocol import commands
from trainer_cell.protocol.commands import AdapterSpec
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.ranks import Ranks
from trainer_cell.training.build import Base
from trainer_cell.training.slots import Slot, SlotTable
from trainer_cell.training.step import forward_backward, optim_step

SPEC = AdapterSpec(4, 8.0, train_attn=True, train_mlp=True, train_unembed=True)
DATA = batches(512, 1, (9, 3, 30, 1))[0]
OTHER = batches(512, 2, (9, 3, 30, 1))[1]


def fresh(base: Base, seed: int = 1) -> Slot:
    return SlotTable(base, 1, 8).create("one", SPEC, seed)


def trained(base: Base, ranks: Ranks, steps: int = 1) -> Slot:
    """With moments, and B no longer zero."""
    slot = fresh(base)
    for _ in range(steps):
        forward_backward(base, slot, ranks, forward_backward_command(DATA))
        optim_step(slot, ranks, optim_command(ADAM))
    return slot


def overflowing() -> list[Datum]:
    return [Datum(datum.tokens, datum.targets, torch.full_like(datum.weights, 3e38)) for datum in DATA]


def test_training_lowers_the_loss_and_moves_everything(base: Base, ranks: Ranks) -> None:
    slot = fresh(base)
    data = [Datum(datum.tokens, datum.targets, torch.ones_like(datum.weights)) for datum in DATA]
    losses = []
    for _ in range(4):
        losses.append(forward_backward(base, slot, ranks, forward_backward_command(data)).metrics["loss:sum"])
        optim_step(slot, ranks, optim_command(ADAM))
    assert all(later < earlier for earlier, later in pairwise(losses))
    assert all(bool(tensor.abs().max() > 0) for tensor in slot.state().weight.values())


def test_the_loss_is_the_weighted_sum_of_the_logprobs_said(base: Base, ranks: Ranks) -> None:
    done = forward_backward(base, fresh(base), ranks, forward_backward_command(DATA))
    said = logprobs_of(done)
    assert [len(values) for values in said] == [len(datum.tokens) for datum in DATA]
    expected = -sum(float((datum.weights * values).sum()) for datum, values in zip(DATA, said, strict=True))
    assert done.metrics["loss:sum"] == pytest.approx(expected, rel=1e-6)


def test_the_same_commands_give_the_same_bits_whatever_another_slot_does(base: Base, ranks: Ranks) -> None:
    alone = trained(base, ranks, steps=3)
    beside, other = fresh(base), fresh(base, seed=2)
    for _ in range(3):
        forward_backward(base, beside, ranks, forward_backward_command(DATA))
        forward_backward(base, other, ranks, forward_backward_command(OTHER))
        optim_step(beside, ranks, optim_command(ADAM))
        optim_step(other, ranks, optim_command(ADAM))
    assert snapshot(alone) == snapshot(beside)
    assert snapshot(alone) != snapshot(other)


def test_gradients_add_up_until_the_step(base: Base, ranks: Ranks) -> None:
    together, apart = fresh(base), fresh(base)
    forward_backward(base, together, ranks, forward_backward_command([*DATA, *OTHER]))
    forward_backward(base, apart, ranks, forward_backward_command(DATA))
    first = apart.optimizer.gradient
    assert first is not None
    first = first.clone()
    forward_backward(base, apart, ranks, forward_backward_command(OTHER))
    whole, summed = together.optimizer.gradient, apart.optimizer.gradient
    assert whole is not None
    assert summed is not None
    assert float((whole - summed).abs().max()) < 1e-5 * float(whole.abs().max())
    assert float((whole - first).abs().max()) > 1e-2 * float(whole.abs().max())


def test_forward_only_gives_the_same_logprobs_and_changes_nothing(base: Base, ranks: Ranks) -> None:
    slot = trained(base, ranks)
    forward_backward(base, slot, ranks, forward_backward_command(OTHER))
    before = snapshot(slot)
    only = forward_backward(base, slot, ranks, forward_backward_command(DATA, forward_only=True))
    assert snapshot(slot) == before
    both = forward_backward(base, slot, ranks, forward_backward_command(DATA))
    assert snapshot(slot) != before
    assert only.logprobs == both.logprobs
    assert only.metrics == both.metrics


def test_forward_only_is_no_reason_to_step(base: Base, ranks: Ranks) -> None:
    slot = fresh(base)
    forward_backward(base, slot, ranks, forward_backward_command(DATA, forward_only=True))
    with pytest.raises(CommandFailed) as failure:
        optim_step(slot, ranks, optim_command(ADAM))
    assert failure.value.kind is ErrorKind.NO_GRADIENTS


def outside(base: Base, what: str) -> commands.Datum:
    """A datum over one of this base's own limits, or else one that is bad for every base."""
    length = base.description.max_context + 1 if what == "beyond the context" else 3
    tokens = torch.ones(length, dtype=torch.int64)
    targets = tokens * (base.shape.vocab if what == "target out of range" else 1)
    inputs = tokens * (base.shape.vocab if what == "token out of range" else 1)
    if what in ("beyond the context", "target out of range", "token out of range"):
        return wire_datum(Datum(inputs, targets, torch.ones(length)))
    return BAD_DATA[what][0]()


@pytest.mark.parametrize("what", BAD_DATA)
def test_refused_data_leaves_the_slot_bit_identical(base: Base, ranks: Ranks, what: str) -> None:
    slot = trained(base, ranks)
    forward_backward(base, slot, ranks, forward_backward_command(DATA))
    before = snapshot(slot)
    with pytest.raises(CommandFailed) as failure:
        forward_backward(base, slot, ranks, forward_backward_command([*DATA, outside(base, what)]))
    assert failure.value.kind is ErrorKind.BAD_COMMAND
    assert failure.value.message.startswith(f"data[{len(DATA)}]")
    assert snapshot(slot) == before


@pytest.mark.parametrize("changed", [{"learning_rate": math.nan}, {"beta1": 1.0}, {"eps": -1.0}])
def test_a_refused_step_keeps_the_gradients_and_everything_else(
    base: Base, ranks: Ranks, changed: dict[str, float]
) -> None:
    slot = trained(base, ranks)
    forward_backward(base, slot, ranks, forward_backward_command(DATA))
    before = snapshot(slot)
    with pytest.raises(CommandFailed):
        optim_step(slot, ranks, optim_command({**ADAM, **changed}))
    assert snapshot(slot) == before
    optim_step(slot, ranks, optim_command(ADAM))


def test_a_step_without_gradients_is_refused_and_changes_nothing(base: Base, ranks: Ranks) -> None:
    slot = trained(base, ranks)
    before = snapshot(slot)
    with pytest.raises(CommandFailed) as failure:
        optim_step(slot, ranks, optim_command(ADAM))
    assert failure.value.kind is ErrorKind.NO_GRADIENTS
    assert snapshot(slot) == before


def test_a_failure_inside_the_pass_leaves_earlier_gradients_and_no_trace(base: Base, ranks: Ranks) -> None:
    slot, undisturbed = trained(base, ranks), trained(base, ranks)
    for one in (slot, undisturbed):
        forward_backward(base, one, ranks, forward_backward_command(DATA))
    before, long_rows, passes = snapshot(slot), batches(512, 1, (1500, 1500, 1500))[0], []

    def fail_in_the_second_row(*_: object) -> None:
        passes.append(None)
        if len(passes) == 2:
            raise MemoryError("no memory is left")

    hook = base.model.decoder.layers[2].register_forward_hook(fail_in_the_second_row)
    with pytest.raises(CommandFailed) as failure:
        forward_backward(base, slot, ranks, forward_backward_command(long_rows))
    hook.remove()
    assert failure.value.kind is ErrorKind.RANK_FAILED
    assert snapshot(slot) == before
    assert all(not layer.is_adapted() for layer in base.adapted)
    for one in (slot, undisturbed):
        forward_backward(base, one, ranks, forward_backward_command(OTHER))
        optim_step(one, ranks, optim_command(ADAM))
    assert snapshot(slot) == snapshot(undisturbed)


def test_non_finite_gradients_are_not_applied_and_the_window_is_cleared(base: Base, ranks: Ranks) -> None:
    slot, undisturbed = trained(base, ranks), trained(base, ranks)
    before = snapshot(slot)
    forward_backward(base, slot, ranks, forward_backward_command(overflowing()))
    done = optim_step(slot, ranks, optim_command(ADAM))
    assert done.metrics["skipped_non_finite"] == 1.0
    assert all(math.isfinite(value) for value in done.metrics.values())
    assert (done.step, done.iteration) == (1, 1)
    assert snapshot(slot) == before
    for one in (slot, undisturbed):
        forward_backward(base, one, ranks, forward_backward_command(DATA))
        applied = optim_step(one, ranks, optim_command(ADAM))
        assert "skipped_non_finite" not in applied.metrics
    assert snapshot(slot) == snapshot(undisturbed)


def test_finite_gradients_whose_squares_overflow_are_not_applied_either(base: Base, ranks: Ranks) -> None:
    slot = trained(base, ranks)
    before = snapshot(slot)
    large = torch.full_like(slot.optimizer.master, 1e25)
    slot.optimizer.accumulate(large.clone())
    done = optim_step(slot, ranks, optim_command({**ADAM, "grad_clip_norm": 0.0}))
    assert done.metrics["skipped_non_finite"] == 1.0
    assert snapshot(slot) == before
    slot.optimizer.accumulate(large)
    assert "skipped_non_finite" not in optim_step(slot, ranks, optim_command(ADAM)).metrics  # clipped to norm 1
    assert bool(slot.optimizer.exp_avg_sq.isfinite().all())
