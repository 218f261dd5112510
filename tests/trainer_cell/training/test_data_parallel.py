from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer_cell.forked_ranks import run_on_ranks
from tests.trainer_cell.training.programs import two_ranks


@pytest.mark.cell
def test_two_data_parallel_ranks_keep_every_promise_of_one(tiny: Path) -> None:
    run_on_ranks(2, two_ranks.main, tiny)
