"""A small training job for tests: batches that differ from step to step and are the same for everyone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import tinker

from tests.service.running import datum

ADAM = tinker.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01, grad_clip_norm=1.0)


def batch(step: int, data_seed: int = 0, size: int = 4) -> list[tinker.Datum]:
    """`size` sequences of 3 to 24 tokens with weights of several values."""
    generator = random.Random(f"{data_seed}/{step}")
    data = []
    for _ in range(size):
        tokens = [generator.randrange(512) for _ in range(generator.randrange(4, 25))]
        data.append(datum(tokens, [generator.choice([0.5, 1.0, 2.0]) for _ in tokens[1:]]))
    return data


def logprobs_of(result: tinker.ForwardBackwardOutput) -> list[list[float]]:
    return [list(output["logprobs"].data) for output in result.loss_fn_outputs]


def train_step(model: tinker.TrainingClient, step: int, data_seed: int = 0) -> list[list[float]]:
    """One forward_backward and one optim_step, both sent before either is answered; the logprobs before the step."""
    forward_backward = model.forward_backward(batch(step, data_seed), "cross_entropy")
    optim_step = model.optim_step(ADAM)
    optim_step.result()
    return logprobs_of(forward_backward.result())


def train(model: tinker.TrainingClient, steps: Sequence[int], data_seed: int = 0) -> list[list[list[float]]]:
    return [train_step(model, step, data_seed) for step in steps]


def probe(model: tinker.TrainingClient) -> list[list[float]]:
    """Logprobs of a fixed batch, without touching the model."""
    return logprobs_of(model.forward(batch(10_000), "cross_entropy").result())
