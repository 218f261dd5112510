"""One verdict from all ranks, and votes that speak for one attempt alone; on two real ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.cell


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "0", "-m", "tests.trainer_cell.programs.verdicts"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda of_rank: int(of_rank["rank"]))


def test_every_rank_gets_rank_0s_bytes_and_its_own_value(seen: list[dict[str, Any]]) -> None:
    assert [of_rank["broadcast"] for of_rank in seen] == ["frame", "frame"]
    assert [of_rank["agreed"] for of_rank in seen] == [0, 10]
    assert [of_rank["first"] for of_rank in seen] == [0, 0]


def test_one_ranks_failure_is_raised_alike_on_all_and_names_it(seen: list[dict[str, Any]]) -> None:
    assert [of_rank["one"] for of_rank in seen] == [["storage_failed", "rank 1: ENOSPC: No space left on device"]] * 2
    assert [of_rank["typed"] for of_rank in seen] == [["bad_command", "rank 0: no"]] * 2
    assert [of_rank["first failed"] for of_rank in seen] == [["rank_failed", "ValueError: bug"]] * 2


def test_the_next_step_after_a_failure_pairs_with_itself(seen: list[dict[str, Any]]) -> None:
    assert [of_rank["still agreed"] for of_rank in seen] == ["yes", "yes"]


def test_a_vote_speaks_for_its_own_attempt_and_a_missing_one_is_a_no(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["votes"] == {"a": [None, "storage_failed"], "b": [None, "deadline_exceeded"], "c": [None, None]}
    assert 1.0 <= seen[0]["seconds"] < 5.0


def test_other_ranks_hear_where_an_attempt_is_staged_or_that_it_is_not(seen: list[dict[str, Any]]) -> None:
    assert seen[1]["places"] == ["token", None, None]
