"""BF16 gradients are added up in FP32, over the rows of a command and over commands."""

from __future__ import annotations

import pytest
import torch

from tests.trainer_cell.training.arithmetic import ADAM, Datum, batches
from tests.trainer_cell.training.wire import forward_backward_command, optim_command
from trainer_cell.protocol.commands import AdapterSpec
from trainer_cell.ranks import Ranks
from trainer_cell.training import step
from trainer_cell.training.build import Base
from trainer_cell.training.slots import Slot, SlotTable
from trainer_cell.training.step import forward_backward, optim_step

SPEC = AdapterSpec(4, 8.0, train_attn=True, train_mlp=True, train_unembed=True)
SEQUENCES = batches(512, 1, (12,) * 16)[0]


def fresh(base: Base, ranks: Ranks) -> Slot:
    slot = SlotTable(base, 1, 8).create("one", SPEC, 1)
    forward_backward(base, slot, ranks, forward_backward_command(SEQUENCES[:2]))
    optim_step(slot, ranks, optim_command(ADAM))
    return slot


def gradient_of(base: Base, ranks: Ranks, *windows: list[Datum]) -> torch.Tensor:
    """After a forward_backward of each."""
    slot = fresh(base, ranks)
    for data in windows:
        forward_backward(base, slot, ranks, forward_backward_command(data))
    assert slot.optimizer.gradient is not None
    return slot.optimizer.gradient


@pytest.mark.parametrize("over", ["rows", "commands"])
def test_the_sum_is_that_of_fp32_and_not_of_bf16(
    bf16_base: Base, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, over: str
) -> None:
    monkeypatch.setattr(step, "tokens_per_row", lambda total, num_stages: 12)
    single = [gradient_of(bf16_base, ranks, [datum]) for datum in SEQUENCES]
    if over == "rows":
        found = gradient_of(bf16_base, ranks, SEQUENCES)
    else:
        found = gradient_of(bf16_base, ranks, *([datum] for datum in SEQUENCES))
    assert found.dtype == torch.float32
    expected, in_bf16 = torch.zeros_like(found), torch.zeros_like(found, dtype=torch.bfloat16)
    for gradient in single:
        expected += gradient
        in_bf16 += gradient.bfloat16()
    assert torch.equal(found, expected)
    assert float((in_bf16.float() - expected).norm()) > 1e-3 * float(expected.norm())  # what BF16 would have made of it


def test_a_gradient_too_small_for_bf16_is_not_lost_beside_a_large_one(bf16_base: Base, ranks: Ranks) -> None:
    large = [Datum(datum.tokens, datum.targets, datum.weights * 1000) for datum in SEQUENCES[:1]]
    small = [Datum(datum.tokens, datum.targets, datum.weights) for datum in SEQUENCES[1:2]]
    alone, both = gradient_of(bf16_base, ranks, large), gradient_of(bf16_base, ranks, large, *[small] * 10)
    added = both - alone
    assert torch.allclose(added, 10 * gradient_of(bf16_base, ranks, small), rtol=1e-2, atol=1e-6 * float(both.max()))
    in_bf16 = alone.bfloat16()
    for _ in range(10):
        in_bf16 += gradient_of(bf16_base, ranks, small).bfloat16()
    assert float((in_bf16.float() - both).norm()) > 0.1 * float(added.norm())
