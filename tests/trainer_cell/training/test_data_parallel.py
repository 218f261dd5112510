from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer_cell.training.arithmetic import run_program


@pytest.mark.cell
def test_two_data_parallel_ranks_keep_every_promise_of_one(tiny: Path) -> None:
    run_program("two_ranks", tiny, ranks=2)
