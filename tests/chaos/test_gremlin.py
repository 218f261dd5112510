"""What is called a kill is one, and the service comes back from each by itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.chaos.gremlin import Gremlin, Kill, Stage, Victim, plan_of_kills
from tests.chaos.progress import Progress
from tests.service.running import RunningService


def test_the_same_seed_plans_the_same_kills_of_every_kind() -> None:
    kills = plan_of_kills(1, 200, 2500, ranks=2)
    assert kills == plan_of_kills(1, 200, 2500, ranks=2) != plan_of_kills(2, 200, 2500, ranks=2)
    assert {kill.victim for kill in kills} == set(Victim)
    assert {kill.recovery for kill in kills} == {None, *Stage}
    assert {kill.victim for kill in plan_of_kills(1, 8, 250, ranks=1)} == set(Victim) - {Victim.OTHER_RANK}


@pytest.mark.parametrize("seed", range(20))
def test_no_plan_kills_the_cell_three_times_with_nothing_in_between(seed: int) -> None:
    since = 0
    for kill in plan_of_kills(seed, 200, 2500, ranks=2):
        since = 0 if kill.commands >= 12 else since
        since += kill.victim is not Victim.GATEWAY
        assert since < 3


def test_who_waits_for_commands_is_let_go_when_no_more_will_come() -> None:
    progress = Progress(2)
    with ThreadPoolExecutor(3) as pool:
        waiting = pool.submit(progress.wait_for_more, 2)
        progress.note()
        clients = [pool.submit(progress.wait_for_quiet) for _ in range(2)]
        assert not waiting.result(10)
        progress.quiet()
        assert [client.result(10) for client in clients] == [None, None]


@pytest.mark.cell
@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_service_comes_back_from_every_kill(tmp_path: Path) -> None:
    service = RunningService(tmp_path, ranks=2)
    urls: list[str] = []
    plan = [*map(Kill, Victim), *(Kill(Victim.CELL, recovery=stage) for stage in Stage)]
    plan += [Kill(Victim.GATEWAY, recovery=stage) for stage in Stage]
    try:
        service.start()
        gremlin = Gremlin(service, 2, urls.append, seed=1)
        before = gremlin.wait_for(Stage.READY)
        gremlin.run(plan, Progress(1))
        after = gremlin.wait_for(Stage.READY, [before.gateway, *before.cell])
        assert len(gremlin.done) == len(plan)
        assert urls == [service.url]
        assert len(after.ranks) == 2
        assert service.stop() == 0
    finally:
        service.kill_everything()
