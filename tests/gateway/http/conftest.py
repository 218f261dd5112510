from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.http.running import RunningGateway, running_gateway


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short path: a unix socket's may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="cg-") as path:
        yield Path(path)


@pytest.fixture
def gateway(directory: Path) -> Iterator[RunningGateway]:
    with running_gateway(directory) as running:
        yield running


@pytest.fixture(scope="module")
def shared_gateway() -> Iterator[RunningGateway]:
    """For tests that leave nothing behind that another could notice."""
    with tempfile.TemporaryDirectory(prefix="cg-") as path, running_gateway(Path(path)) as running:
        yield running
