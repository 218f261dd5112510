"""The same client program under tensor and pipeline parallelism, and from one to the other."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import tinker
import torch

from tests.service.conftest import Serve
from tests.service.running import RunningService
from tests.service.state import State, read_state
from tests.service.test_resume import new_model, save
from tests.service.training import ADAM, batch, logprobs_of, probe, train, train_step
from trainer_cell.training import tiny_base

pytestmark = pytest.mark.cell

LAYOUTS = [(("--tp", "2"), (2, 1)), (("--pp", "2"), (1, 2))]
Logprobs = list[list[float]]


def assert_close(ours: Logprobs, theirs: Logprobs) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, abs=1e-3)


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.full)], ids=["tp to pp", "pp to tp"])
def test_a_run_goes_on_under_another_layout(serve: Serve, first: int) -> None:
    (options, sizes), (other_options, other_sizes) = LAYOUTS[first], LAYOUTS[1 - first]
    service = serve(*options, ranks=2)
    model = new_model(service)
    train(model, range(3))
    saved = model.save_state("saved").result().path
    state = read_state(service.checkpoints, saved)
    assert (state.manifest.layout.tensor, state.manifest.layout.pipeline) == sizes
    before, at_next_step = probe(model), train_step(model, 3)
    after = save(service, model, "after")
    assert service.stop() == 0

    service = serve(*other_options, ranks=2)
    resumed = service.client().create_training_client_from_state_with_optimizer(saved).result()
    again = save(service, resumed, "again")
    assert again.same_as(state)
    assert (again.manifest.layout.tensor, again.manifest.layout.pipeline) == other_sizes
    assert_close(probe(resumed), before)
    assert_close(train_step(resumed, 3), at_next_step)
    assert_moments_close(save(service, resumed, "after"), after)
    if first == 0:
        a_killed_rank_costs_time_alone(service, saved)
    assert service.stop() == 0


def assert_moments_close(ours: State, theirs: State) -> None:
    assert ours.step == theirs.step == 4
    for key, data in theirs.part("exp_avg").items():
        expected = torch.frombuffer(bytearray(data), dtype=torch.float32)
        found = torch.frombuffer(bytearray(ours.tensors[key]), dtype=torch.float32)
        assert float((found - expected).abs().max()) <= 1e-3 * float(expected.abs().max())


def a_killed_rank_costs_time_alone(service: RunningService, saved: str) -> None:
    """In the middle of a pass, where the other stage waits for it."""
    resume = service.client().create_training_client_from_state_with_optimizer
    undisturbed, model = resume(saved).result(), resume(saved).result()
    expected = results(large_passes(undisturbed))
    ranks = service.ranks()
    pending = large_passes(model)
    ranks[1].kill()
    assert results(pending) == expected
    for one in (undisturbed, model):
        one.optim_step(ADAM).result()
    assert save(service, model, "end").same_as(save(service, undisturbed, "end"))
    assert not any(rank.is_running() for rank in ranks)


def large_passes(model: tinker.TrainingClient) -> list[tinker.APIFuture[tinker.ForwardBackwardOutput]]:
    return [model.forward_backward(batch(step, size=200), "cross_entropy") for step in range(8)]


def results(pending: Sequence[tinker.APIFuture[tinker.ForwardBackwardOutput]]) -> list[Logprobs]:
    return [logprobs_of(future.result(timeout=120)) for future in pending]


@pytest.fixture
def smollm2_like(tmp_path: Path) -> Path:
    """A base model of nine heads and three KV heads, as far as its config goes."""
    directory = tmp_path / "nine-heads"
    directory.mkdir()
    tiny_base.write(directory)
    config = {**tiny_base.CONFIG, "num_attention_heads": 9, "num_key_value_heads": 3}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


REASON = "this base model cannot have this layout: 9 heads and 3 KV heads cannot be split over 2 tensor-parallel ranks"


def test_a_layout_the_base_model_cannot_have_ends_the_service_at_once_with_the_reason(
    tmp_path: Path, smollm2_like: Path
) -> None:
    command = [sys.executable, "-m", "gateway.cli", "serve", "--state", str(tmp_path / "state"), "--port", "0"]
    command += ["--base-model", str(smollm2_like), "--ranks", "2", "--tp", "2"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1] == REASON
    assert "cell |" not in refused.stderr
    assert "cellgate ready" not in refused.stdout


@pytest.mark.full
def test_a_cell_started_apart_says_the_same_in_one_line(tmp_path: Path, smollm2_like: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "trainer_cell", "--base-model", str(smollm2_like), "--checkpoints", str(tmp_path / "checkpoints")]
    command += ["--gateway-socket", str(tmp_path / "socket"), "--tp", "2"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 1
    assert refused.stderr.count(f"the trainer cell cannot start: {REASON}\n") == 1
