"""The losses once more, straight from their published formulas: values in NumPy, and in torch for autograd to derive.

Needs torch, not the cell. Everything is of one sequence, in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tests.trainer_cell.training.arithmetic import Tensors

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A loss as a client asks for it. in_force: its options, defaults included."""

    loss: str
    config: Mapping[str, float]
    in_force: Mapping[str, float]


def _given(loss: str, **options: float) -> Case:
    return Case(loss, options, options)


def _clips(low: float, high: float) -> dict[str, float]:
    return {"clip_low_threshold": low, "clip_high_threshold": high}


CASES = {
    "cross_entropy": _given("cross_entropy"),
    "importance_sampling": _given("importance_sampling"),
    "ppo": Case("ppo", {}, _clips(0.8, 1.2)),
    "ppo, wide": _given("ppo", **_clips(0.3, 3.0)),
    "ppo, one given": Case("ppo", {"clip_high_threshold": 1.05}, _clips(0.8, 1.05)),
    "cispo": Case("cispo", {}, _clips(0.0, 4.0)),
    "cispo, narrow": _given("cispo", **_clips(0.7, 1.3)),
    "dro": _given("dro", beta=0.05),
    "gspo": _given("gspo", **_clips(0.9, 1.1)),
}


@dataclass
class Result:
    """What one loss makes of the data: log-probabilities by sequence, the loss, gradients of the adapter."""

    logprobs: list[torch.Tensor]
    loss: float
    gradients: Tensors


@dataclass
class Losses:
    """Data, and what a reference makes of it.

    inputs: of all losses, by sequence. fp32: by name of the case, in FP32 throughout. exact and bf16: cross_entropy of
    the model with its weights rounded to BF16, computed in FP32 and in BF16.
    """

    tokens: list[torch.Tensor]
    inputs: list[Tensors] = field(default_factory=list)
    fp32: dict[str, Result] = field(default_factory=dict)
    exact: Result | None = None
    bf16: Result | None = None


def value(case: Case, logprobs: Floats, inputs: Mapping[str, Floats]) -> float:
    """The loss of one sequence, token by token."""
    low, high = (case.in_force.get(f"clip_{end}_threshold", np.nan) for end in ("low", "high"))
    total = 0.0
    for at, log_p in enumerate(logprobs):
        if case.loss == "cross_entropy":
            total -= inputs["weights"][at] * log_p
            continue
        advantage, log_q = inputs["advantages"][at], inputs["logprobs"][at]
        ratio = np.exp(log_p - log_q)
        match case.loss:
            case "importance_sampling":
                total -= ratio * advantage
            case "ppo":
                total -= min(ratio * advantage, min(max(ratio, low), high) * advantage)
            case "cispo":
                total -= min(max(ratio, low), high) * log_p * advantage
            case "dro":
                total -= log_p * advantage - 0.5 * case.in_force["beta"] * (log_p - log_q) ** 2
            case "gspo":
                marked = [place for place, mark in enumerate(inputs["sequence_ratio_mask"]) if mark]
                product = np.prod([np.exp(logprobs[place] - inputs["logprobs"][place]) for place in marked])
                ratio = product ** (1 / len(marked))
                total -= min(ratio * advantage, min(max(ratio, low), high) * advantage)
    return float(total)


def derivable(case: Case, logprobs: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    """The loss of one sequence as a graph over `logprobs`."""
    if case.loss == "cross_entropy":
        return (-logprobs * inputs["weights"]).sum()
    advantages, log_ratio = inputs["advantages"], logprobs - inputs["logprobs"]
    match case.loss:
        case "importance_sampling":
            return -(torch.exp(log_ratio) * advantages).sum()
        case "cispo":
            clipped = torch.clamp(torch.exp(log_ratio), *case.in_force.values())
            return -(clipped.detach() * logprobs * advantages).sum()
        case "dro":
            return -(logprobs * advantages - 0.5 * case.in_force["beta"] * log_ratio**2).sum()
        case "gspo":
            of_sequence = log_ratio.detach()[inputs["sequence_ratio_mask"] != 0].mean()
            log_ratio = of_sequence + logprobs - logprobs.detach()
    ratio = torch.exp(log_ratio)
    clipped = torch.clamp(ratio, *case.in_force.values())
    return -torch.min(ratio * advantages, clipped * advantages).sum()


def inputs_near(logprobs: torch.Tensor, generator: torch.Generator) -> Tensors:
    """Float32 inputs of every loss for a sequence that the policy gives these log-probabilities.

    Ratios lie between e^-2 and e^2. The first token is masked as clients mask prompts; a third of the others have no
    advantage, a third a negative one.
    """

    def random() -> torch.Tensor:
        return torch.rand(len(logprobs), generator=generator)

    kind, size = random(), random() + 0.5
    signed = torch.where(kind < 1 / 3, 0.0, torch.where(kind < 2 / 3, -size, size))
    if len(signed) > 1:
        signed[0] = 0.0
    mask = (random() < 0.7).float()
    mask[-1] = 0.5  # anything but zero marks a token
    return {
        "weights": signed,
        "advantages": signed,
        "logprobs": logprobs.float() + 4 * random() - 2,
        "sequence_ratio_mask": mask,
    }


def margin(case: Case, logprobs: torch.Tensor, inputs: Tensors) -> float:
    """How far the nearest ratio is from a threshold: closer than rounding, two right answers may differ."""
    log_ratio = (logprobs - inputs["logprobs"]).detach()
    if case.loss == "gspo":
        log_ratio = log_ratio[inputs["sequence_ratio_mask"] != 0].mean()
    thresholds = [end for name, end in case.in_force.items() if name.startswith("clip_")]
    return min((float((torch.exp(log_ratio) - end).abs().min()) for end in thresholds), default=np.inf)
