"""One cell of one rank inside the test process, for what needs no second rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainer_cell.protocol.outcomes import Layout
from trainer_cell.ranks import Ranks
from trainer_cell.training.base_models import prepare
from trainer_cell.training.build import Base, build_base, start_parallel

ALONE = Layout(world=1, tensor=1, pipeline=1, data=1)


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare("tiny", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="package")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    from megatron.core import parallel_state

    store = tmp_path_factory.mktemp("store") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    start_parallel(ALONE)
    yield Ranks()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="package")
def base(tiny: Path, ranks: Ranks) -> Base:
    return build_base(tiny, ALONE, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="package")
def bf16_base(tiny: Path, ranks: Ranks) -> Base:
    return build_base(tiny, ALONE, torch.device("cpu"), torch.bfloat16)
