"""A command's corners under tensor and pipeline parallelism: what it says and leaves is what one rank says and leaves.

Gradients themselves are compared with peft's in `test_arithmetic`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from tests.trainer_cell import odd_base
from tests.trainer_cell.client import Client
from tests.trainer_cell.forked_ranks import run_on_ranks
from tests.trainer_cell.running_cell import RunningCell, running_cell
from tests.trainer_cell.training.arithmetic import Datum, batches
from tests.trainer_cell.training.programs import copies
from trainer_cell.protocol.commands import AdapterSpec
from trainer_cell.protocol.errors import ErrorKind
from trainer_cell.protocol.outcomes import Failed, ForwardBackwardDone, OptimStepDone

pytestmark = pytest.mark.cell

SPEC = AdapterSpec(4, 8.0, train_attn=True, train_mlp=True, train_unembed=True)
LENGTHS = (17, 5, 33, 2, 64, 21)
WARM_UP, DATA, LONG = batches(odd_base.VOCAB, 3, LENGTHS)[0], *batches(odd_base.VOCAB, 2, (300, 9, 700, 2, 450))
# Two rows for two stages; one sequence, so fewer rows than stages and data-parallel ranks without data; many rows.
COMMANDS = {
    "several rows": WARM_UP,
    "reversed": WARM_UP[::-1],
    "one token": WARM_UP[1:2],
    "one": DATA[:1],
    "long": LONG,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return odd_base.write(tmp_path_factory.mktemp("odd") / "base")


@pytest.fixture(scope="module")
def one(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCell]:
    with running_cell(base, tmp_path_factory.mktemp("one")) as cell:
        yield cell


@pytest.mark.parametrize(
    ("ranks", "tp", "pp", "options"),
    [
        (2, 2, 1, ()),
        (2, 1, 2, ()),
        (4, 1, 2, ()),
        (4, 2, 2, ()),
        (2, 2, 1, ("--recompute",)),
        (2, 1, 2, ("--recompute",)),
    ],
)
def test_every_corner_is_as_on_one_rank(
    base: Path, one: RunningCell, tmp_path: Path, ranks: int, tp: int, pp: int, options: tuple[str, ...]
) -> None:
    with running_cell(base, tmp_path, *options, ranks=ranks, tp=tp, pp=pp) as cell:
        ours, theirs = (Client(each, f"model-{ranks}-{tp}-{len(options)}:train:0", SPEC) for each in (cell, one))
        for model in (ours, theirs):
            model.create(seed=1)
            model.train(WARM_UP)
        for data in COMMANDS.values():
            says_the_same(ours, theirs, data)
        refuses_bad_data_alike(ours, theirs)
        skips_what_overflows(ours, tmp_path)
        assert cell.stop() == [0] * ranks


def says_the_same(ours: Client, theirs: Client, data: Sequence[Datum]) -> None:
    """Forward alone, then with the backward pass, then the step."""
    forward = msgspec.structs.replace(ours.forward_backward(data), forward_only=True)
    only = ours.cell.do(forward, ForwardBackwardDone)
    (our, our_norm), (their, their_norm) = (trained(model, data) for model in (ours, theirs))
    assert (only.logprobs, only.metrics) == (our.logprobs, our.metrics)
    assert [len(said) for said in our.logprobs] == [4 * len(datum.tokens) for datum in data]
    for said, expected in zip(our.logprobs, their.logprobs, strict=True):
        assert torch.allclose(float32(said), float32(expected), atol=1e-3)
    assert our.metrics["loss:sum"] == pytest.approx(their.metrics["loss:sum"], rel=1e-4, abs=1e-3)
    assert our_norm == pytest.approx(their_norm, rel=1e-3)


def trained(model: Client, data: Sequence[Datum]) -> tuple[ForwardBackwardDone, float]:
    """What the pass said, and the norm of its gradient."""
    done = model.cell.do(model.forward_backward(data), ForwardBackwardDone)
    return done, model.cell.do(model.optim_step(), OptimStepDone).metrics["grad_norm"]


def refuses_bad_data_alike(ours: Client, theirs: Client) -> None:
    bad = Datum(DATA[0].tokens, DATA[0].targets + odd_base.VOCAB, DATA[0].weights)
    failures = [model.cell.execute(model.forward_backward([*DATA, bad])) for model in (ours, theirs)]
    for failed in failures:
        assert isinstance(failed, Failed)
        assert failed.kind is ErrorKind.BAD_COMMAND
        assert failed.message.startswith(f"data[{len(DATA)}].target_tokens[0]")
    refused = ours.cell.execute(ours.optim_step())
    assert isinstance(refused, Failed)
    assert refused.kind is ErrorKind.NO_GRADIENTS


def skips_what_overflows(model: Client, root: Path) -> None:
    before = model.save(root, "before")
    large = [Datum(datum.tokens, datum.targets, torch.full_like(datum.weights, 3e38)) for datum in DATA[:1]]
    model.cell.do(model.forward_backward(large), ForwardBackwardDone)
    stepped = model.cell.do(model.optim_step(), OptimStepDone)
    assert stepped.metrics["skipped_non_finite"] == 1.0
    assert model.save(root, "after").same_as(before)


def float32(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float32)


# Three data-parallel ranks: of two, a sum has one order only.
def test_copies_of_a_weight_stay_the_same_bits_when_many_ranks_are_summed(base: Path) -> None:
    run_on_ranks(6, copies.main, base, 2)


@pytest.mark.full
def test_sums_left_as_they_come_would_drift_apart(base: Path) -> None:
    with pytest.raises(AssertionError, match=r"the copies of .* differ"):
        run_on_ranks(6, copies.each_to_its_own, base, 2)
