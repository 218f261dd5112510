"""Where crashes are played: in memory if there is a file system in it, because what is asked is what is visible."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.injection import Driver, running_driver
from tests.crash.workload import small_chunks

_MEMORY = Path("/dev/shm")


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    if not os.access(_MEMORY, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="crash-", dir=_MEMORY) as name:
        yield Path(name)


@pytest.fixture(autouse=True, scope="package")
def _small_chunks() -> Iterator[None]:
    with small_chunks():
        yield


@pytest.fixture(scope="package")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with running_driver(tmp_path_factory.mktemp("driver") / "warm") as driver:
        yield driver
