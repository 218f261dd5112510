"""Services shared by the tests of this package: each starts once, when the first test asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.running import RunningService

Serve = Callable[..., RunningService]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start a service over the test's own directory; whatever still runs at the test's end is killed."""
    started: list[RunningService] = []

    def start(*options: str, **others: Any) -> RunningService:
        service = RunningService(tmp_path, *options, **others)
        started.append(service)
        return service.start()

    yield start
    for service in started:
        service.kill_everything()


def _running(state: Path, *options: str, ranks: int = 1) -> Iterator[RunningService]:
    # Many tests share it, and their clients end as programs that die do: more models than slots take turns in them.
    service = RunningService(state, *options, ranks=ranks)
    try:
        yield service.start()
        assert service.stop() == 0, "".join(service.log)
    finally:
        service.kill_everything()


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    yield from _running(tmp_path_factory.mktemp("one-rank"))


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    yield from _running(tmp_path_factory.mktemp("two-ranks"), ranks=2)


@pytest.fixture(scope="session")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    yield from _running(tmp_path_factory.mktemp("bf16"), "--dtype", "bf16")


@pytest.fixture(params=["one_rank", "two_ranks"])
def service(request: pytest.FixtureRequest) -> RunningService:
    """Each test that takes this runs on one rank and on two (data parallel)."""
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]
