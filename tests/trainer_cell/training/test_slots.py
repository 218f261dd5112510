from __future__ import annotations

import msgspec
import pytest
import torch

from tests.trainer_cell.training.arithmetic import ADAM
from tests.trainer_cell.training.snapshots import snapshot
from tests.trainer_cell.training.test_step import DATA
from tests.trainer_cell.training.wire import forward_backward_command, optim_command
from trainer_cell.protocol.commands import AdapterSpec
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.ranks import Ranks
from trainer_cell.training.build import Base
from trainer_cell.training.slots import SlotTable
from trainer_cell.training.step import forward_backward, optim_step

SPEC = AdapterSpec(4, 8.0, train_attn=True, train_mlp=True, train_unembed=True)


def test_a_model_is_made_found_and_freed(base: Base) -> None:
    table = SlotTable(base, 2, 8)
    slot = table.create("a", SPEC, seed=1)
    assert table.get("a") is slot
    assert table.resident() == (slot,)
    assert table.free("a")
    assert not table.free("a")
    with pytest.raises(CommandFailed) as failure:
        table.get("a")
    assert failure.value.kind is ErrorKind.UNKNOWN_MODEL


def test_the_limit_and_doubles_are_refused(base: Base) -> None:
    table = SlotTable(base, 1, 8)
    table.create("a", SPEC, seed=1)
    with pytest.raises(CommandFailed) as failure:
        table.create("a", SPEC, seed=1)
    assert failure.value.kind is ErrorKind.MODEL_EXISTS
    with pytest.raises(CommandFailed) as failure:
        table.create("b", SPEC, seed=1)
    assert failure.value.kind is ErrorKind.NO_FREE_SLOT
    table.free("a")
    table.create("b", SPEC, seed=1)


@pytest.mark.parametrize(
    "changed",
    [
        {"rank": 0},
        {"rank": -1},
        {"rank": 9},
        {"alpha": float("nan")},
        {"alpha": 0.0},
        {"train_attn": False, "train_mlp": False, "train_unembed": False},
    ],
)
def test_a_bad_adapter_shape_is_a_user_error_and_takes_no_slot(base: Base, changed: dict[str, float]) -> None:
    table = SlotTable(base, 1, 8)
    with pytest.raises(CommandFailed) as failure:
        table.create("a", msgspec.structs.replace(SPEC, **changed), seed=1)
    assert failure.value.kind is ErrorKind.BAD_COMMAND
    assert table.resident() == ()


def test_the_next_model_of_a_freed_slot_is_untouched_by_the_last(base: Base, ranks: Ranks) -> None:
    table = SlotTable(base, 1, 8)
    pristine = snapshot(table.create("a", SPEC, seed=1))
    for _ in range(2):
        forward_backward(base, table.get("a"), ranks, forward_backward_command(DATA))
        optim_step(table.get("a"), ranks, optim_command(ADAM))
    assert snapshot(table.get("a")) != pristine
    table.free("a")
    assert snapshot(table.create("b", SPEC, seed=1)) == pristine


def test_writing_into_the_state_changes_the_slot_in_place(base: Base) -> None:
    slot = SlotTable(base, 1, 8).create("a", SPEC, seed=1)
    state = slot.state()
    assert list(state.weight) == list(slot.adapter.table)
    for part in (state.weight, state.master, state.exp_avg, state.exp_avg_sq):
        assert {name: tuple(tensor.shape) for name, tensor in part.items()} == {
            name: sharding.local_shape for name, sharding in slot.adapter.table.items()
        }
        assert all(tensor.is_contiguous() for tensor in part.values())
    name = next(iter(state.weight))
    state.weight[name].fill_(2.0)
    assert bool((slot.adapter.parameters[name] == 2.0).all())
    assert bool((state.master[name] == 2.0).all())  # in FP32 the weight is the master


def test_fresh_moments_keep_the_iteration(base: Base, ranks: Ranks) -> None:
    slot = SlotTable(base, 1, 8).create("a", SPEC, seed=1)
    forward_backward(base, slot, ranks, forward_backward_command(DATA))
    optim_step(slot, ranks, optim_command(ADAM))
    assert bool(slot.optimizer.exp_avg.abs().max() > 0)
    slot.optimizer.fresh_moments()
    assert (slot.optimizer.step, slot.optimizer.iteration) == (0, 1)
    assert not slot.optimizer.exp_avg.any()
    assert not slot.optimizer.exp_avg_sq.any()


def test_in_bf16_weights_are_rounded_from_masters_and_gradients_are_summed_in_fp32(
    bf16_base: Base, ranks: Ranks
) -> None:
    slot = SlotTable(bf16_base, 1, 8).create("a", SPEC, seed=1)
    optimizer, weights = slot.optimizer, slot.adapter.flat
    assert weights.dtype == torch.bfloat16
    for _ in range(3):
        forward_backward(bf16_base, slot, ranks, forward_backward_command(DATA))
        assert optimizer.gradient is not None
        assert optimizer.gradient.dtype == torch.float32
        optim_step(slot, ranks, optim_command({**ADAM, "learning_rate": 1e-5}))
    assert torch.equal(weights, optimizer.master.bfloat16())
    assert not torch.equal(weights.float(), optimizer.master)
    exact = optimizer.master.clone()
    optimizer.masters_from_weights()
    assert torch.equal(optimizer.master, weights.float())
    optimizer.master.copy_(exact + 1.0)
    optimizer.weights_from_masters()
    assert torch.equal(weights, (exact + 1.0).bfloat16())


def test_a_step_of_no_size_shows_stale_masters(bf16_base: Base, ranks: Ranks) -> None:
    slot = SlotTable(bf16_base, 1, 8).create("a", SPEC, seed=1)

    def step_of_no_size() -> None:
        forward_backward(bf16_base, slot, ranks, forward_backward_command(DATA))
        optim_step(slot, ranks, optim_command({**ADAM, "learning_rate": 0.0}))

    slot.adapter.flat.detach().fill_(0.5)
    loaded = slot.adapter.flat.clone()
    slot.optimizer.masters_from_weights()
    step_of_no_size()
    assert torch.equal(slot.adapter.flat, loaded)
    slot.adapter.flat.detach().fill_(0.25)  # and the masters are not told
    loaded = slot.adapter.flat.clone()
    step_of_no_size()
    assert not torch.equal(slot.adapter.flat, loaded)
