"""What a GPU changes: its own arithmetic, pinned buffers, NCCL. The rest of the suite runs on it as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.service.running import RunningService
from tests.service.state import read_state
from tests.service.test_resume import new_model, save
from tests.service.test_tenants import check_four_at_once
from tests.service.training import batch, probe, train, train_step

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.cell, pytest.mark.skipif(NUM_GPUS == 0, reason="there is no GPU")]
RANKS = [1, pytest.param(2, marks=pytest.mark.skipif(NUM_GPUS < 2, reason="there are no two GPUs"))]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningService]:
    """As a GPU machine has it without options: BF16, and passes may be grouped in any way."""
    service = RunningService(tmp_path)
    try:
        yield service.start()
        assert service.stop() == 0, "".join(service.log)
    finally:
        service.kill_everything()


def free_memory() -> int:
    """Bytes, on the first GPU, whoever has the others."""
    return torch.cuda.mem_get_info(0)[0]


def test_a_cell_takes_the_gpu_where_there_is_one(tmp_path: Path) -> None:
    free = free_memory()
    service = RunningService(tmp_path)
    try:
        state = save(service.start(), new_model(service), "first")
        assert free - free_memory() > 64 << 20, "a CUDA context alone takes more"
        assert set(state.part("master")) == {key.replace("/weight", "/master") for key in state.part("weight")}
    finally:
        service.kill_everything()


@pytest.mark.parametrize("ranks", RANKS)
def test_with_deterministic_what_is_resumed_after_a_kill_ends_bit_identical(tmp_path: Path, ranks: int) -> None:
    service = RunningService(tmp_path, "--deterministic", ranks=ranks)
    try:
        service.start()
        uninterrupted, live = new_model(service), new_model(service)
        assert train(uninterrupted, range(3)) == train(live, range(3))
        saved = uninterrupted.save_state("saved").result().path
        for model in (uninterrupted, live):
            model.forward_backward(batch(8), "cross_entropy").result()
        next_logprobs = train_step(uninterrupted, 3)
        after = save(service, uninterrupted, "after")
        service.kill()
        service.start()
        assert train_step(live, 3) == next_logprobs
        assert save(service, live, "after").same_as(after)
        resumed = service.client().create_training_client_from_state_with_optimizer(saved).result()
        resumed.forward_backward(batch(8), "cross_entropy").result()
        assert train_step(resumed, 3) == next_logprobs
        assert save(service, resumed, "after").same_as(after)
        assert service.stop() == 0
    finally:
        service.kill_everything()


def test_without_it_a_load_still_restores_the_very_bits_and_the_next_step_agrees(running: RunningService) -> None:
    trained = new_model(running)
    train(trained, range(3))
    saved = trained.save_state("saved").result().path
    resumed = running.client().create_training_client_from_state_with_optimizer(saved).result()
    assert save(running, resumed, "again").same_as(read_state(running.checkpoints, saved))
    for one, other in zip(train_step(trained, 3), train_step(resumed, 3), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-2)


def test_with_deterministic_clients_at_once_each_end_where_they_end_alone(tmp_path: Path) -> None:
    service = RunningService(tmp_path, "--deterministic")
    try:
        check_four_at_once(service.start())
    finally:
        service.kill_everything()


def test_a_save_that_goes_on_behind_training_holds_the_state_of_when_it_was_asked_for(running: RunningService) -> None:
    """What is copied from the GPU while the next step runs must not be of the next step."""
    model = new_model(running)
    train(model, range(2))
    before = save(running, model, "before")
    pending = model.save_state("meanwhile")
    train(model, range(2, 6))
    assert read_state(running.checkpoints, pending.result().path).same_as(before)


def test_a_model_that_gave_way_to_others_comes_back_with_the_same_logprobs(tmp_path: Path) -> None:
    service = RunningService(tmp_path, "--deterministic", "--slots", "1")
    try:
        first = new_model(service.start(), seed=1)
        train(first, range(2))
        seen = probe(first)
        train(new_model(service, seed=2), range(2))
        assert probe(first) == seen
    finally:
        service.kill_everything()
