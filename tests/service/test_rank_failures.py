"""One rank fails in a save: one typed failure for the client, nothing published, the cell lives, the retry works."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from tests.service.running import RunningService
from tests.service.state import read_state
from tests.service.test_resume import new_model, save
from tests.service.training import probe, train, train_step

pytestmark = pytest.mark.cell

FAULTS = Path(__file__).parent / "faults"

CASES = [
    ("create", "EACCES"),
    ("allocate", "ENOSPC"),
    ("write", "EIO"),
    ("fsync", "EIO"),
    ("close", "EDQUOT"),
    ("create", "raised before the write"),
    ("write", "raised inside the write"),
]


@pytest.fixture(scope="module")
def fault_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fault") / "fault.json"


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory, fault_file: Path) -> Iterator[RunningService]:
    environment = {"PYTHONPATH": str(FAULTS), "CELLGATE_TEST_FAULT_FILE": str(fault_file)}
    service = RunningService(tmp_path_factory.mktemp("faulty"), ranks=2, environment=environment)
    try:
        yield service.start()
        assert service.stop() == 0
    finally:
        service.kill_everything()


# Each case on one of the ranks; on the other, in the full suite.
@pytest.mark.parametrize(
    ("operation", "error", "rank"),
    [
        pytest.param(*case, rank, marks=() if (number + rank) % 2 else pytest.mark.full)
        for number, case in enumerate(CASES)
        for rank in (0, 1)
    ],
)
def test_a_failing_rank_is_one_typed_failure_and_the_retry_works(
    faulty: RunningService, fault_file: Path, rank: int, operation: str, error: str
) -> None:
    pids = [process.pid for process in faulty.ranks()]
    mine, other = new_model(faulty, seed=1), new_model(faulty, seed=2)
    train(mine, range(1))
    before = save(faulty, mine, "before")
    fault_file.write_text(json.dumps({"rank": rank, "operation": operation, "error": error}))
    try:
        with pytest.raises(tinker.RequestFailedError) as failed:
            mine.save_state("target").result(timeout=30)
    finally:
        fault_file.unlink()
    assert f"rank {rank}" in str(failed.value)
    assert error in str(failed.value)
    assert failed.value.category == "server"
    assert [path for path in (faulty.checkpoints / ".staging").iterdir() if path.is_dir()] == []
    assert save(faulty, mine, "target").same_as(before)
    assert train_step(other, 0) == train_step(new_model(faulty, seed=2), 0)
    assert [process.pid for process in faulty.ranks()] == pids


def test_a_failed_overwrite_leaves_the_old_state_loadable(faulty: RunningService, fault_file: Path) -> None:
    model = new_model(faulty)
    train(model, range(1))
    saved = model.save_state("kept").result().path
    old = read_state(faulty.checkpoints, saved)
    logprobs = probe(model)
    train(model, range(1, 2))
    fault_file.write_text(json.dumps({"rank": 1, "operation": "fsync", "error": "EIO"}))
    try:
        with pytest.raises(tinker.RequestFailedError):
            model.save_state("kept", overwrite=True).result(timeout=30)
    finally:
        fault_file.unlink()
    assert read_state(faulty.checkpoints, saved).same_as(old)
    model.load_state_with_optimizer(saved).result()
    assert probe(model) == logprobs
