"""Loss functions over per-token log-probabilities, by their wire name. Every loss is a sum over tokens and datums.

Definitions are those of https://tinker-docs.thinkingmachines.ai/tinker/losses; with p the policy that is trained and q
the one that sampled, `logprobs` of a datum are log q, and the ratio of a token is p / q.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from trainer_cell.protocol.commands import DType
from trainer_cell.protocol.errors import CommandFailed, ErrorKind

LossConfig = Mapping[str, float | str]
Options = Mapping[str, float]


@dataclass(frozen=True)
class Tokens:
    """One packed row as a loss sees it.

    logprobs: float32 [tokens], of the target tokens, with their graph; inputs: [tokens] each, by name; lengths: of the
    sequences, which lie one after another.
    """

    logprobs: torch.Tensor
    inputs: Mapping[str, torch.Tensor]
    lengths: tuple[int, ...]


# Float32 losses [tokens], and what is counted, by name: bool [tokens] each.
Terms = tuple[torch.Tensor, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Loss:
    """One loss function.

    inputs: what every datum must carry, by name and dtype, each of shape [T]; `target_tokens` is always among them.
    compute: its terms from a row and from its options.
    options: the numbers it takes and their defaults; without a default a number must be given.
    masks: inputs that must mark at least one token of a datum by a value other than zero.
    """

    name: str
    inputs: Mapping[str, DType]
    compute: Callable[[Tokens, Options], Terms]
    options: Mapping[str, float | None]
    masks: frozenset[str] = frozenset()

    def terms(self, row: Tokens) -> Terms:
        return self.compute(row, {name: value for name, value in self.options.items() if value is not None})


def _cross_entropy(row: Tokens, _options: Options) -> Terms:
    """-weight · log p"""
    return -row.inputs["weights"] * row.logprobs, {}


def _importance_sampling(row: Tokens, _options: Options) -> Terms:
    """-ratio · advantage"""
    advantages = row.inputs["advantages"]
    return -torch.exp(_unless_masked(_log_ratio(row), advantages)) * advantages, {}


def _ppo(row: Tokens, options: Options) -> Terms:
    """-min(ratio · advantage, clip(ratio) · advantage), token by token (Schulman et al. 2017, arXiv 1707.06347)."""
    return _clipped(_log_ratio(row), row.inputs["advantages"], options)


def _cispo(row: Tokens, options: Options) -> Terms:
    """-clip(ratio) · log p · advantage, where the clipped ratio is a constant (MiniMax-M1, arXiv 2506.13585)."""
    ratio, (low, high) = torch.exp(_log_ratio(row).detach()), _thresholds(options)
    advantages = row.inputs["advantages"]
    counts = {"clipped_tokens": ((ratio < low) | (ratio > high)) & (advantages != 0)}
    return -ratio.clamp(low, high) * row.logprobs * advantages, counts


def _dro(row: Tokens, options: Options) -> Terms:
    """-(log p · advantage - beta / 2 · (log p - log q)²) (Richemond et al. 2024, arXiv 2405.19107).

    The penalty is not masked: a token without an advantage is still held to its `logprobs`.
    """
    penalty = 0.5 * options["beta"] * _log_ratio(row).square()
    return penalty - row.logprobs * row.inputs["advantages"], {}


def _gspo(row: Tokens, options: Options) -> Terms:
    """As ppo, with one ratio for a sequence: the geometric mean over the tokens `sequence_ratio_mask` marks.

    The variant by tokens of Zheng et al. 2025, arXiv 2507.18071: every token has the value of the sequence's ratio and
    the gradient of its own log-probability.
    """
    parts = _log_ratio(row).detach().split(row.lengths)
    marks = (row.inputs["sequence_ratio_mask"] != 0).split(row.lengths)
    of_sequences = [part[mark].mean().expand(len(part)) for part, mark in zip(parts, marks, strict=True)]
    log_ratio = torch.cat(of_sequences) + (row.logprobs - row.logprobs.detach())
    return _clipped(log_ratio, row.inputs["advantages"], options)


def _clipped(log_ratio: torch.Tensor, advantages: torch.Tensor, options: Options) -> Terms:
    log_ratio = _unless_masked(log_ratio, advantages)
    bound = torch.exp(log_ratio.detach()).clamp(*_thresholds(options)) * advantages
    is_bound = bound < torch.exp(log_ratio.detach()) * advantages
    # Where the bound holds there is no gradient, not even one of zero times an overflowing ratio.
    free = torch.exp(torch.where(is_bound, 0.0, log_ratio)) * advantages
    return -torch.where(is_bound, bound, free), {"clipped_tokens": is_bound}


def _log_ratio(row: Tokens) -> torch.Tensor:
    return row.logprobs - row.inputs["logprobs"]


def _unless_masked(log_ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """0 where there is no advantage: a ratio that overflows there would make NaN of its product with zero."""
    return torch.where(advantages == 0, 0.0, log_ratio)


def _thresholds(options: Options) -> tuple[float, float]:
    return options["clip_low_threshold"], options["clip_high_threshold"]


def _clip(low: float | None, high: float | None) -> dict[str, float | None]:
    return {"clip_low_threshold": low, "clip_high_threshold": high}


_OF_TARGETS: Mapping[str, DType] = {"target_tokens": "int64", "weights": "float32"}
_OF_SAMPLES: Mapping[str, DType] = {"target_tokens": "int64", "logprobs": "float32", "advantages": "float32"}
_MASKED: Mapping[str, DType] = {**_OF_SAMPLES, "sequence_ratio_mask": "float32"}

# No default is known of gspo's thresholds and dro's beta: one made up here would train something else in silence.
LOSSES: Mapping[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss("cross_entropy", _OF_TARGETS, _cross_entropy, {}),
        Loss("importance_sampling", _OF_SAMPLES, _importance_sampling, {}),
        Loss("ppo", _OF_SAMPLES, _ppo, _clip(0.8, 1.2)),
        Loss("cispo", _OF_SAMPLES, _cispo, _clip(0.0, 4.0)),
        Loss("dro", _OF_SAMPLES, _dro, {"beta": None}),
        Loss("gspo", _MASKED, _gspo, _clip(None, None), frozenset({"sequence_ratio_mask"})),
    )
}
_NOT_COMPUTED = {
    "stable_reinforce": "it reads what a sampler recorded, and this service does not sample",
    "custom": "losses cannot be uploaded; forward_backward_custom with a function needs no upload",
}


def find_loss(name: str, config: LossConfig) -> Loss:
    """The loss with its options filled in. Raises `CommandFailed` (BAD_COMMAND) for an unknown name or bad options."""
    if name in _NOT_COMPUTED:
        raise _refused(f"{name} is not supported: {_NOT_COMPUTED[name]}")
    loss = LOSSES.get(name)
    if loss is None:
        raise _refused(f"unknown loss {name[:64]!r}; known: {', '.join(sorted(LOSSES))}")
    loss = replace(loss, options={**loss.options, **{key: _number(loss, key, config[key]) for key in config}})
    for option, value in loss.options.items():
        if value is None:
            raise _refused(f"{name} needs the option {option}")
    low, high = (loss.options.get(f"clip_{end}_threshold") for end in ("low", "high"))
    if low is not None and high is not None and low > high:
        raise _refused(f"clip_low_threshold {low} is above clip_high_threshold {high}")
    return loss


def _number(loss: Loss, option: str, value: float | str) -> float:
    if option not in loss.options:
        known = ", ".join(sorted(loss.options)) or "none"
        raise _refused(f"{loss.name} has no option {option[:64]!r}; known: {known}")
    if isinstance(value, str) or not math.isfinite(value):
        raise _refused(f"option {option} is {str(value)[:64]!r}: it must be a finite number")
    return value


def _refused(message: str) -> CommandFailed:
    return CommandFailed(ErrorKind.BAD_COMMAND, message)
