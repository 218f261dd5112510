from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from gateway.http.limits import Limits
from tests.gateway.http.running import ALICE, RunningGateway, running_gateway


@pytest.fixture
def gateway() -> Iterator[RunningGateway]:
    with tempfile.TemporaryDirectory(prefix="cg-") as path, running_gateway(Path(path), Limits(poll_s=0.5)) as running:
        yield running


@pytest.fixture
def service(gateway: RunningGateway) -> Iterator[tinker.ServiceClient]:
    """With telemetry on, as it is by default."""
    with tinker.ServiceClient(base_url=gateway.where.url, api_key=ALICE) as client:
        yield client
