"""What the two sides of a comparison exchange: jobs, and what became of them. Needs torch, not the cell."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[3]
ALL_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
RANK, ALPHA = 4, 16.0
# Decay and clipping are on: norms here are far above the limit.
ADAM = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01, "grad_clip_norm": 1.0}

Tensors = dict[str, torch.Tensor]


@dataclass
class Datum:
    tokens: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


@dataclass
class Step:
    """What one step left: logprobs and loss before it, gradients and their norm before clipping, Adam's average."""

    logprobs: list[torch.Tensor]
    loss: float
    gradients: Tensors
    grad_norm: float
    exp_avg: Tensors = field(default_factory=dict)
    exp_avg_sq: Tensors = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)


@dataclass
class Record:
    """Everything one side says of a model: logits of the base alone (a pipeline shows none), then a step for each
    batch."""

    base_logits: list[torch.Tensor]
    steps: list[Step]


def batches(vocab: int, num_steps: int, lengths: tuple[int, ...]) -> list[list[Datum]]:
    """The same data for everyone, other data for each step; some weights are zero and some negative."""
    generator = torch.Generator().manual_seed(5)

    def datum(length: int) -> Datum:
        ids = torch.randint(0, vocab, (length + 1,), generator=generator)
        weights = torch.rand(length, generator=generator) * 1.5 - 0.25
        return Datum(ids[:-1], ids[1:], torch.where(weights.abs() < 0.1, 0.0, weights))

    return [[datum(length) for length in lengths] for _ in range(num_steps)]


def initial(shapes: Mapping[str, tuple[int, ...]], spread: float) -> Tensors:
    """Random A and B: with B zero, A would have no gradient to compare."""
    return {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread
        for seed, (name, shape) in enumerate(sorted(shapes.items()))
    }


def largest_difference(ours: Tensors, theirs: Tensors) -> float:
    """Over all tensors, the largest deviation relative to the tensor's largest element."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - value).abs().max() / value.abs().max()) for name, value in theirs.items())


def compare(ours: Record, theirs: Record) -> dict[str, float]:
    """Deviations by quantity, the worst over all steps; relative to the largest element but for logits and logprobs."""
    pairs = list(zip(ours.steps, theirs.steps, strict=True))
    return {
        "base_logits": _absolute([ours.base_logits], [theirs.base_logits]) if ours.base_logits else 0.0,
        "first_logprobs": _absolute([ours.steps[0].logprobs], [theirs.steps[0].logprobs]),
        "logprobs": _absolute([step.logprobs for step in ours.steps], [step.logprobs for step in theirs.steps]),
        "loss": max(abs(our.loss - their.loss) / abs(their.loss) for our, their in pairs),
        "grad_norm": max(abs(our.grad_norm - their.grad_norm) / their.grad_norm for our, their in pairs),
        "first_gradients": largest_difference(pairs[0][0].gradients, pairs[0][1].gradients),
        "exp_avg": largest_difference(pairs[-1][0].exp_avg, pairs[-1][1].exp_avg),
    }


def _absolute(ours: list[list[torch.Tensor]], theirs: list[list[torch.Tensor]]) -> float:
    pairs = [pair for our, their in zip(ours, theirs, strict=True) for pair in zip(our, their, strict=True)]
    return max((float((our - their).abs().max()) for our, their in pairs), default=0.0)


def run_program(module: str, *arguments: object) -> None:
    """A program of this package in a process of its own. Its output is shown if it fails."""
    command = [sys.executable, "-m", f"tests.trainer_cell.training.programs.{module}", *map(str, arguments)]
    environment: dict[str, Any] = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, cwd=REPOSITORY, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
