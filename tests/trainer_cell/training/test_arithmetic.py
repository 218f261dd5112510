"""The cell against transformers, peft and torch's AdamW, from the same adapter and data.

The largest deviations of two correct attention kernels within transformers itself are 5e-6 (small models) and 1.7e-4
(SmolLM2) of a gradient's largest element, and 1.1e-3 of SmolLM2's logits: limits lie above those and far below
anything a mistake makes. Weights after a step are compared from given gradients only: AdamW's first steps divide a
gradient by itself, so an element near rounding error goes either way.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer_cell.training.arithmetic import Record, compare, largest_difference, run_program
from trainer_cell.training.base_models import default_cache, prepare

SMALL_MODELS = ("tiny", "tied", "odd-vocabulary", "llama3-rope", "qwen2", "qwen3")
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

pytestmark = pytest.mark.cell


def load(directory: Path, model: str, world: int) -> tuple[dict[str, Record], Record]:
    ours: dict[str, Record] = torch.load(directory / f"{model}.{world}.pt", weights_only=False)
    theirs: Record = torch.load(directory / f"{model}.reference.pt", weights_only=False)
    return ours, theirs


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the records of all small models, at one rank and at two."""
    directory = tmp_path_factory.mktemp("arithmetic")
    (directory / "tiny").symlink_to(prepare("tiny", tmp_path_factory.mktemp("cache")))
    run_program("reference", directory, *SMALL_MODELS)
    run_program("train", directory, *SMALL_MODELS, ranks=1)
    run_program("train", directory, "tiny", "qwen3", ranks=2)
    return directory


@pytest.fixture(scope="module")
def compared_smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("smollm2")
    (directory / "smollm2").symlink_to(prepare("smollm2-135m", default_cache()))
    run_program("reference", directory, "smollm2")
    run_program("train", directory, "smollm2", ranks=1)
    run_program("train", directory, "smollm2", ranks=2)
    return directory


def beyond(limits: dict[str, float], deviations: dict[str, float]) -> dict[str, float]:
    return {quantity: found for quantity, found in deviations.items() if not found <= limits[quantity]}


@pytest.mark.parametrize(("model", "world"), [*((model, 1) for model in SMALL_MODELS), ("tiny", 2), ("qwen3", 2)])
def test_three_steps_match_peft_and_adamw(compared: Path, model: str, world: int) -> None:
    ours, theirs = load(compared, model, world)
    assert not beyond(SMALL_LIMITS, compare(ours["sum"], theirs))


@pytest.mark.parametrize("world", [1, 2])
def test_one_step_of_smollm2_matches_peft_and_adamw(compared_smollm2: Path, world: int) -> None:
    ours, theirs = load(compared_smollm2, "smollm2", world)
    assert not beyond(SMOLLM2_LIMITS, compare(ours["sum"], theirs))


def test_averaging_over_ranks_would_be_seen(compared: Path) -> None:
    ours, theirs = load(compared, "tiny", 2)
    seen = beyond(SMALL_LIMITS, compare(ours["mean"], theirs))
    assert seen.keys() == {"grad_norm", "first_gradients"}  # clipping hides the factor from what follows
    assert seen["first_gradients"] > 0.4


@pytest.mark.parametrize(("model", "world"), [("tiny", 1), ("tiny", 2), ("qwen3", 1)])
def test_norm_clipping_and_adamw_from_given_gradients_match_torch(compared: Path, model: str, world: int) -> None:
    ours, theirs = load(compared, model, world)
    for our, their in zip(ours["given"].steps, theirs.steps, strict=True):
        assert our.grad_norm == pytest.approx(their.grad_norm, rel=1e-6)
        assert largest_difference(our.exp_avg, their.exp_avg) < 1e-6
        assert largest_difference(our.exp_avg_sq, their.exp_avg_sq) < 1e-6
        assert max(float((our.weights[n] - value).abs().max()) for n, value in their.weights.items()) < 1e-7


def test_two_ranks_say_the_same_as_one(compared: Path) -> None:
    one, _ = load(compared, "tiny", 1)
    two, _ = load(compared, "tiny", 2)
    assert not beyond(SMALL_LIMITS, compare(two["sum"], one["sum"]))
