"""Every loss through the model and the adapter, against transformers, peft and autograd; and BF16 against both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer_cell.training.arithmetic import ALPHA, RANK, largest_difference, run_program
from tests.trainer_cell.training.loss_formulas import CASES, Case, Losses, Result
from tests.trainer_cell.training.wire import MODEL, array, logprobs_of
from trainer_cell.protocol import commands
from trainer_cell.protocol.commands import AdapterSpec
from trainer_cell.protocol.outcomes import ForwardBackwardDone
from trainer_cell.ranks import Ranks
from trainer_cell.training.build import Base
from trainer_cell.training.losses import LOSSES
from trainer_cell.training.slots import Slot, SlotTable
from trainer_cell.training.step import forward_backward

SPEC = AdapterSpec(RANK, ALPHA, train_attn=True, train_mlp=True, train_unembed=True)
# Two correct attention kernels differ by 5e-6 of a gradient's largest element; the ratios multiply what they differ by.
LIMIT = 5e-5


@pytest.fixture(scope="module")
def reference(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Losses, dict[str, torch.Tensor]]:
    directory = tmp_path_factory.mktemp("losses")
    (directory / "tiny").symlink_to(tiny)
    run_program("reference_losses", directory)
    losses: Losses = torch.load(directory / "losses.pt", weights_only=False)
    return losses, torch.load(directory / "tiny.initial.pt")


def slot_with(base: Base, values: dict[str, torch.Tensor]) -> Slot:
    slot = SlotTable(base, 1, RANK).create("compared", SPEC, seed=0)
    for name, tensor in slot.state().master.items():
        tensor.copy_(values[name])
    slot.optimizer.weights_from_masters()
    return slot


def command(case: Case, losses: Losses) -> commands.ForwardBackward:
    wanted = LOSSES[case.loss].inputs
    data = tuple(
        commands.Datum(tokens.to(torch.int32).numpy().tobytes(), {name: array(inputs[name].clone()) for name in wanted})
        for tokens, inputs in zip(losses.tokens, losses.inputs, strict=True)
    )
    return commands.ForwardBackward("fb", MODEL, data, case.loss, dict(case.config), forward_only=False)


def ours(base: Base, ranks: Ranks, began: dict[str, torch.Tensor], wanted: commands.ForwardBackward) -> Result:
    slot = slot_with(base, began)
    done: ForwardBackwardDone = forward_backward(base, slot, ranks, wanted)
    gradient = slot.optimizer.gradient
    assert gradient is not None
    return Result(logprobs_of(done), done.metrics["loss:sum"], slot.adapter.views(gradient))


@pytest.mark.parametrize("name", CASES)
def test_loss_and_adapter_gradients_match_peft(
    base: Base, ranks: Ranks, reference: tuple[Losses, dict[str, torch.Tensor]], name: str
) -> None:
    losses, began = reference
    mine, theirs = ours(base, ranks, began, command(CASES[name], losses)), losses.fp32[name]
    assert mine.loss == pytest.approx(theirs.loss, rel=1e-4)
    assert largest_difference(mine.gradients, theirs.gradients) < LIMIT


def test_another_clip_would_be_seen_in_the_gradients(
    base: Base, ranks: Ranks, reference: tuple[Losses, dict[str, torch.Tensor]]
) -> None:
    losses, began = reference
    mine = ours(base, ranks, began, command(CASES["ppo"], losses))
    assert largest_difference(mine.gradients, losses.fp32["ppo, wide"].gradients) > 1000 * LIMIT
    assert largest_difference(mine.gradients, losses.fp32["importance_sampling"].gradients) > 1000 * LIMIT


def away(result: Result, exact: Result) -> dict[str, float]:
    """How far a computation in BF16 is from the exact one: root mean square, relative for gradients."""
    said, right = torch.cat(result.logprobs), torch.cat(exact.logprobs)
    gradients, true = (torch.cat([one.gradients[n].flatten() for n in exact.gradients]) for one in (result, exact))
    return {
        "logprobs": float((said - right).square().mean().sqrt()),
        "gradients": float((gradients - true).norm() / true.norm()),
    }


def test_bf16_is_as_near_to_exact_as_transformers_is_in_bf16(
    bf16_base: Base, ranks: Ranks, reference: tuple[Losses, dict[str, torch.Tensor]]
) -> None:
    """The same BF16 weights in FP32 arithmetic are exact. The limit is half as far again as another correct BF16
    computation is from that."""
    losses, began = reference
    assert losses.exact is not None
    assert losses.bf16 is not None
    mine = ours(bf16_base, ranks, began, command(CASES["cross_entropy"], losses))
    limits = {quantity: 1.5 * found for quantity, found in away(losses.bf16, losses.exact).items()}
    assert max(limits.values()) < 0.15
    for quantity, found in away(mine, losses.exact).items():
        assert 0 < found < limits[quantity], quantity
    scaled = Result(mine.logprobs, mine.loss, {name: 1.25 * tensor for name, tensor in mine.gradients.items()})
    assert away(scaled, losses.exact)["gradients"] > limits["gradients"]
