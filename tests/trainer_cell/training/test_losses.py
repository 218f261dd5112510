"""Every loss against its published formula, values and gradients, apart from any model."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.trainer_cell.training.arithmetic import Tensors
from tests.trainer_cell.training.loss_formulas import CASES, Case, derivable, inputs_near, margin, value
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.training.losses import Tokens, find_loss

LENGTHS = (9, 1, 30, 5)
TOLERANCE = 1e-5  # float32, relative to the largest


def some_row(seed: int = 0) -> tuple[list[torch.Tensor], list[Tensors]]:
    generator = torch.Generator().manual_seed(seed)
    logprobs = [-8 * torch.rand(length, generator=generator) for length in LENGTHS]
    return logprobs, [inputs_near(one, generator) for one in logprobs]


def ours(case: Case, logprobs: list[torch.Tensor], inputs: list[Tensors]) -> tuple[float, torch.Tensor]:
    """Loss and gradient as the cell has them, over all sequences in one row."""
    row = torch.cat(logprobs).requires_grad_()
    packed = {name: torch.cat([one[name] for one in inputs]) for name in inputs[0]}
    terms, _ = find_loss(case.loss, case.config).terms(Tokens(row, packed, LENGTHS))
    terms.sum().backward()
    assert row.grad is not None
    return float(terms.detach().sum()), row.grad


def derived(case: Case, logprobs: list[torch.Tensor], inputs: list[Tensors]) -> torch.Tensor:
    gradients = []
    for one, of_one in zip(logprobs, inputs, strict=True):
        leaf = one.double().requires_grad_()
        derivable(case, leaf, of_one).backward()
        gradients.append(leaf.grad)
    return torch.cat(gradients)


def expected(case: Case, logprobs: list[torch.Tensor], inputs: list[Tensors]) -> float:
    return sum(
        value(case, one.double().numpy(), {name: tensor.double().numpy() for name, tensor in of_one.items()})
        for one, of_one in zip(logprobs, inputs, strict=True)
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_those_of_the_formula(name: str, seed: int) -> None:
    case, (logprobs, inputs) = CASES[name], some_row(seed)
    assert all(margin(case, *pair) > 1e-5 for pair in zip(logprobs, inputs, strict=True))
    loss, gradient = ours(case, logprobs, inputs)
    assert loss == pytest.approx(expected(case, logprobs, inputs), rel=TOLERANCE)
    reference = derived(case, logprobs, inputs)
    assert float((gradient - reference).abs().max()) < TOLERANCE * float(reference.abs().max())
    if case.loss in ("ppo", "cispo", "gspo"):  # both sides of the clip are there
        counted = counted_as_clipped(case, logprobs, inputs)
        assert 0 < counted < sum(LENGTHS)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if len(case.in_force) == 2])
def test_swapped_or_shifted_thresholds_would_be_seen(name: str) -> None:
    case, (logprobs, inputs) = CASES[name], some_row()
    loss, _ = ours(case, logprobs, inputs)
    low, high = case.in_force.values()
    for wrong in ((high, low), (low, high * 1.2)):
        other = replace(case, in_force=dict(zip(case.in_force, wrong, strict=True)))
        assert loss != pytest.approx(expected(other, logprobs, inputs), rel=10 * TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_a_mean_instead_of_the_sum_would_be_seen(name: str) -> None:
    logprobs, inputs = some_row()
    loss, _ = ours(CASES[name], logprobs, inputs)
    assert loss != pytest.approx(expected(CASES[name], logprobs, inputs) / sum(LENGTHS), rel=0.1)


def test_a_sequence_has_its_own_ratio_wherever_it_is_packed() -> None:
    logprobs, inputs = some_row()
    _, together = ours(CASES["gspo"], logprobs, inputs)
    order = [2, 0, 3, 1]
    row = torch.cat([logprobs[at] for at in order]).requires_grad_()
    packed = {name: torch.cat([inputs[at][name] for at in order]) for name in inputs[0]}
    lengths = tuple(LENGTHS[at] for at in order)
    terms, _ = find_loss("gspo", CASES["gspo"].config).terms(Tokens(row, packed, lengths))
    terms.sum().backward()
    assert row.grad is not None
    moved = dict(zip(order, row.grad.split(lengths), strict=True))
    assert all(torch.equal(moved[at], part) for at, part in enumerate(together.split(LENGTHS)))


def counted_as_clipped(case: Case, logprobs: list[torch.Tensor], inputs: list[Tensors]) -> int:
    row = Tokens(torch.cat(logprobs), {name: torch.cat([one[name] for one in inputs]) for name in inputs[0]}, LENGTHS)
    _, counts = find_loss(case.loss, case.config).terms(row)
    return int(counts["clipped_tokens"].sum())


@pytest.mark.parametrize("name", ["ppo", "ppo, wide", "gspo"])
def test_clipped_tokens_are_those_that_have_lost_their_gradient(name: str) -> None:
    logprobs, inputs = some_row()
    _, gradient = ours(CASES[name], logprobs, inputs)
    weighted = torch.cat([one["advantages"] for one in inputs]) != 0
    assert counted_as_clipped(CASES[name], logprobs, inputs) == int(((gradient == 0) & weighted).sum())


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_a_masked_token_counts_nothing_however_improbable_it_was(name: str) -> None:
    logprobs, inputs = some_row()
    for one in inputs:
        one["logprobs"] = torch.where(one["advantages"] == 0, -500.0, one["logprobs"])
        one["sequence_ratio_mask"] = (one["advantages"] != 0).float()
        one["sequence_ratio_mask"][-1] = 1.0
    if name == "gspo":  # its ratio would be of the masked token as well
        inputs[1]["logprobs"] = logprobs[1].clone()
        for one, of_one in zip(logprobs, inputs, strict=True):
            of_one["logprobs"][-1] = one[-1] - 0.01
    loss, gradient = ours(CASES[name], logprobs, inputs)
    assert math.isfinite(loss)
    assert bool(gradient.isfinite().all())
    assert bool((gradient[torch.cat([one["advantages"] for one in inputs]) == 0] == 0).all())


def test_a_clipped_ratio_that_overflows_has_no_gradient() -> None:
    inputs = {"advantages": torch.tensor([1.0, 1.0]), "logprobs": torch.tensor([-200.0, -1.0])}
    row = torch.tensor([-1.0, -1.0], requires_grad=True)
    terms, _ = find_loss("ppo", {}).terms(Tokens(row, inputs, (2,)))
    terms.sum().backward()
    assert torch.allclose(terms.detach(), torch.tensor([-1.2, -1.0]))
    assert row.grad is not None
    assert row.grad.tolist() == [0.0, -1.0]


REFUSED: dict[str, tuple[str, dict[str, float | str], str]] = {
    "unknown loss": ("grpo", {}, "unknown loss 'grpo'; known: cispo, cross_entropy, dro, gspo"),
    "not computed": ("stable_reinforce", {"kl_coeff": 0.01}, "stable_reinforce is not supported"),
    "uploaded": ("custom", {"loss_id": "x"}, "forward_backward_custom with a function"),
    "unknown option": ("ppo", {"clip_low": 0.5}, "ppo has no option 'clip_low'; known: clip_high_threshold"),
    "option of a loss without": ("cross_entropy", {"beta": 1.0}, "cross_entropy has no option 'beta'; known: none"),
    "NaN": ("ppo", {"clip_low_threshold": math.nan}, "clip_low_threshold is 'nan': it must be a finite number"),
    "infinite": ("cispo", {"clip_high_threshold": math.inf}, "clip_high_threshold is 'inf'"),
    "text": ("dro", {"beta": "0.05"}, "beta is '0.05': it must be a finite number"),
    "crossed": ("ppo", {"clip_low_threshold": 1.2, "clip_high_threshold": 0.8}, "clip_low_threshold 1.2 is above"),
    "crossed with a default": ("ppo", {"clip_low_threshold": 1.3}, "1.3 is above clip_high_threshold 1.2"),
    "no default": ("dro", {}, "dro needs the option beta"),
    "no default for one": ("gspo", {"clip_low_threshold": 0.9}, "gspo needs the option clip_high_threshold"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_names_and_options_are_refused(what: str) -> None:
    name, config, message = REFUSED[what]
    with pytest.raises(CommandFailed) as failure:
        find_loss(name, config)
    assert failure.value.kind is ErrorKind.BAD_COMMAND
    assert message in failure.value.message
