"""The cell against transformers, peft and torch's AdamW, from the same adapter and data.

The largest deviations of two correct attention kernels within transformers itself are 5e-6 (small models) and 1.7e-4
(SmolLM2) of a gradient's largest element, and 1.1e-3 of SmolLM2's logits: limits lie above those and far below
anything a mistake makes. Weights after a step are compared from given gradients only: AdamW's first steps divide a
gradient by itself, so an element near rounding error goes either way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.trainer_cell.forked_ranks import run_on_ranks
from tests.trainer_cell.training.arithmetic import Record, compare, largest_difference, run_program
from tests.trainer_cell.training.programs import train
from trainer_cell.training.base_models import default_cache, prepare

SMALL_MODELS = ("tiny", "tied", "odd-vocabulary", "llama3-rope", "qwen2", "qwen3")
# By number of ranks, model:TPxPP; the rest of the ranks is data parallel.
JOBS = {
    1: [f"{model}:1x1" for model in SMALL_MODELS],
    2: [
        *("tiny:1x1", "qwen3:1x1"),
        *("tiny:2x1", "odd-vocabulary:2x1", "qwen2:2x1", "qwen3:2x1"),
        *("tiny:1x2", "tied:1x2", "qwen2:1x2"),
    ],
    4: ["tied:2x2", "odd-vocabulary:2x2", "qwen3:2x2", "tiny:2x1", "tiny:1x2", "odd-vocabulary:4x1"],
}
ALL_JOBS = [(world, job) for world, jobs in JOBS.items() for job in jobs]
SMOLLM2_JOBS = [(1, "smollm2:1x1"), (2, "smollm2:1x1"), (2, "smollm2:1x2")]
SMALL_LIMITS = {
    "base_logits": 5e-5,
    "first_logprobs": 1e-4,
    "logprobs": 1e-3,
    "loss": 1e-5,
    "grad_norm": 1e-4,
    "first_gradients": 5e-5,
    "exp_avg": 1e-3,
}
SMOLLM2_LIMITS = {
    "base_logits": 5e-3,
    "first_logprobs": 5e-3,
    "logprobs": 5e-3,
    "loss": 1e-5,
    "grad_norm": 1e-4,
    "first_gradients": 1e-3,
    "exp_avg": 1e-3,
}

pytestmark = [pytest.mark.cell, pytest.mark.timeout(600)]


def load(directory: Path, world: int, job: str) -> tuple[dict[str, Record], Record]:
    model, sizes = job.split(":")
    ours: dict[str, Record] = torch.load(directory / f"{model}.{world}.{sizes}.pt", weights_only=False)
    theirs: Record = torch.load(directory / f"{model}.reference.pt", weights_only=False)
    return ours, theirs


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with peft's records of all small models."""
    directory = tmp_path_factory.mktemp("arithmetic")
    (directory / "tiny").symlink_to(prepare("tiny", tmp_path_factory.mktemp("cache")))
    run_program("reference", directory, *SMALL_MODELS)
    return directory


@pytest.fixture(scope="module")
def compared(references: Path) -> Callable[[int], Path]:
    """From a number of ranks to the directory that then holds their records too."""

    @functools.cache
    def with_records(world: int) -> Path:
        run_on_ranks(world, train.main, references, JOBS[world])
        return references

    return with_records


@pytest.fixture(scope="module")
def compared_smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("smollm2")
    (directory / "smollm2").symlink_to(prepare("smollm2-135m", default_cache()))
    run_program("reference", directory, "smollm2")
    run_on_ranks(1, train.main, directory, ["smollm2:1x1"])
    run_on_ranks(2, train.main, directory, ["smollm2:1x1", "smollm2:1x2"])
    return directory


def beyond(limits: dict[str, float], deviations: dict[str, float]) -> dict[str, float]:
    return {quantity: found for quantity, found in deviations.items() if not found <= limits[quantity]}


@pytest.mark.parametrize(("world", "job"), ALL_JOBS)
def test_three_steps_match_peft_and_adamw(compared: Callable[[int], Path], world: int, job: str) -> None:
    ours, theirs = load(compared(world), world, job)
    assert bool(ours["sum"].base_logits) == job.endswith("x1")
    assert not beyond(SMALL_LIMITS, compare(ours["sum"], theirs))


@pytest.mark.parametrize(("world", "job"), SMOLLM2_JOBS)
def test_one_step_of_smollm2_matches_peft_and_adamw(compared_smollm2: Path, world: int, job: str) -> None:
    ours, theirs = load(compared_smollm2, world, job)
    assert not beyond(SMOLLM2_LIMITS, compare(ours["sum"], theirs))


def test_averaging_over_ranks_would_be_seen(compared: Callable[[int], Path]) -> None:
    ours, theirs = load(compared(2), 2, "tiny:1x1")
    seen = beyond(SMALL_LIMITS, compare(ours["mean"], theirs))
    assert seen.keys() == {"grad_norm", "first_gradients"}  # clipping hides the factor from what follows
    assert seen["first_gradients"] > 0.4


@pytest.mark.parametrize(
    ("world", "job"), [one for one in ALL_JOBS if one[1].startswith(("tiny", "odd-vocabulary", "qwen3"))]
)
def test_norm_clipping_and_adamw_from_given_gradients_match_torch(
    compared: Callable[[int], Path], world: int, job: str
) -> None:
    ours, theirs = load(compared(world), world, job)
    for our, their in zip(ours["given"].steps, theirs.steps, strict=True):
        assert our.grad_norm == pytest.approx(their.grad_norm, rel=1e-6)
        assert largest_difference(our.exp_avg, their.exp_avg) < 1e-6
        assert largest_difference(our.exp_avg_sq, their.exp_avg_sq) < 1e-6
        assert max(float((our.weights[n] - value).abs().max()) for n, value in their.weights.items()) < 1e-7


def test_two_ranks_say_the_same_as_one(compared: Callable[[int], Path]) -> None:
    one, _ = load(compared(1), 1, "tiny:1x1")
    two, _ = load(compared(2), 2, "tiny:1x1")
    assert not beyond(SMALL_LIMITS, compare(two["sum"], one["sum"]))
