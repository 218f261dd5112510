"""Kills parts of a running service, by a seeded plan that counts the commands clients have answers to."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import httpx
import psutil

from tests.chaos.progress import Progress
from tests.service.running import READY_TIMEOUT_S, RunningService

# There is no event for what goes on in processes that are not ours.
_LOOK_S = 0.02
_GONE_S = 60.0


class Victim(Enum):
    GATEWAY = "the gateway"
    RANK_0 = "rank 0"
    OTHER_RANK = "a rank other than 0"
    CELL = "the cell's agent"
    GATEWAY_AND_CELL = "gateway and cell"
    EVERYTHING = "the whole service"


class Stage(Enum):
    """How far a recovery has come."""

    STARTED = "what was killed has a successor"
    PEOPLED = "all processes are there again"
    READY = "the service says that it is ready"


@dataclass(frozen=True)
class Kill:
    """commands: how many must be answered, counted from when the service was ready again. recovery: how far it must
    have come instead, for a kill that hits it."""

    victim: Victim
    commands: int = 0
    recovery: Stage | None = None

    def __str__(self) -> str:
        when = f"after {self.commands} commands" if self.recovery is None else f"once {self.recovery.value}"
        return f"{self.victim.value}, {when}"


# A gateway is back within a second or two; a cell has torch to import.
_SHARES = {
    Victim.GATEWAY: 5,
    Victim.RANK_0: 2,
    Victim.OTHER_RANK: 2,
    Victim.CELL: 2,
    Victim.GATEWAY_AND_CELL: 2,
    Victim.EVERYTHING: 1,
}
# Of the kills, how many hit the recovery from the one before.
_DURING_RECOVERY = 0.15
# Fewer commands than this between two kills of a cell may be none at all: they were answered before the first.
_SETTLED = 12
# A command that is lost as often, alone, is held to be the cause.
_POISON = 3


def plan_of_kills(seed: object, num_kills: int, num_commands: int, ranks: int) -> list[Kill]:
    """`num_kills`, spread over the first 70 of a hundred of `num_commands`; every kind there is for so many ranks."""
    pick = random.Random(f"kills/{seed}")
    possible = {victim: share for victim, share in _SHARES.items() if ranks > 1 or victim is not Victim.OTHER_RANK}
    victims = [*possible, *pick.choices(list(possible), list(possible.values()), k=num_kills)][:num_kills]
    pick.shuffle(victims)
    points = sorted(pick.choices(range(num_commands * 7 // 10), k=num_kills))
    kills: list[Kill] = []
    at = 0
    for victim, point in zip(victims, points, strict=True):
        if kills and pick.random() < _DURING_RECOVERY:
            kills.append(Kill(victim, recovery=pick.choice(list(Stage))))
        else:
            kills.append(Kill(victim, point - at))
            at = point
    return list(_without_poison(kills))


def _without_poison(kills: Sequence[Kill]) -> Iterator[Kill]:
    """No command may be on the cell at three kills of it in a row: it would rightly be failed."""
    in_a_row = 0
    for kill in kills:
        if kill.commands >= _SETTLED:
            in_a_row = 0
        if in_a_row == _POISON - 1 and kill.victim is not Victim.GATEWAY:
            kill = Kill(kill.victim, _SETTLED)
            in_a_row = 0
        in_a_row += kill.victim is not Victim.GATEWAY
        yield kill


@dataclass(frozen=True)
class Processes:
    gateway: psutil.Process
    agent: psutil.Process
    ranks: list[psutil.Process]

    @property
    def cell(self) -> list[psutil.Process]:
        return [self.agent, *self.ranks]


class Gremlin:
    """Carries out a plan against `service`. `on_restart` is told when the service is at another URL.

    done: the kills, in words.
    """

    def __init__(self, service: RunningService, ranks: int, on_restart: Callable[[str], None], seed: object) -> None:
        self.done: list[str] = []
        self._service = service
        self._num_ranks = ranks
        self._on_restart = on_restart
        self._random = random.Random(f"gremlin/{seed}")

    def run(self, plan: Sequence[Kill], progress: Progress) -> None:
        """Ends early when the clients will send nothing more, and always with the service ready and quiet."""
        gone: list[psutil.Process] = []
        for kill in plan:
            if kill.recovery is None:
                self.wait_for(Stage.READY, gone)
                if not progress.wait_for_more(kill.commands):
                    break
            else:
                self.wait_for(kill.recovery, gone)
            gone = self.kill(kill.victim)
            self.done.append(f"{progress.count}: {kill}")
        self.wait_for(Stage.READY, gone)
        progress.quiet()

    def kill(self, victim: Victim) -> list[psutil.Process]:
        """SIGKILL; returns, once they are gone, all processes that ended by it and will have successors."""
        if victim is Victim.EVERYTHING:
            return self._restart()
        targets, gone = self._targets(victim, self.wait_for(Stage.STARTED))
        for process in targets:
            _sigkill(process)
        _, alive = psutil.wait_procs(gone, timeout=_GONE_S)
        assert not alive, f"{alive} outlived {victim.value}"
        return gone

    def _targets(self, victim: Victim, found: Processes) -> tuple[list[psutil.Process], list[psutil.Process]]:
        """Whom to kill, and who ends by it. In the middle of a recovery a rank may not be there yet: then its agent."""
        match victim:
            case Victim.GATEWAY:
                return [found.gateway], [found.gateway]
            case Victim.RANK_0:
                return found.ranks[:1] or [found.agent], found.cell
            case Victim.OTHER_RANK:
                others = found.ranks[1:]
                return [self._random.choice(others)] if others else [found.agent], found.cell
            case Victim.CELL:
                return [found.agent], found.cell
            case _:
                return [found.gateway, found.agent], [found.gateway, *found.cell]

    def _restart(self) -> list[psutil.Process]:
        gone = self._service.everything()
        self._service.kill_everything()
        self._service.start()
        self._on_restart(self._service.url)
        return gone

    def wait_for(self, stage: Stage, gone: Sequence[psutil.Process] = ()) -> Processes:
        """Until a recovery has come so far, with other processes than those that are gone; the present ones."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            found = self._look()
            if found is not None and self._has_reached(stage, found, gone):
                return found
            time.sleep(_LOOK_S)
        raise AssertionError(f"not so far that {stage.value}; killed:\n" + "\n".join(self.done))

    def _look(self) -> Processes | None:
        """None while gateway or agent is missing, or a process ends under our eyes."""
        try:
            pids = self._service.pids()
            return Processes(psutil.Process(pids["gateway"]), psutil.Process(pids["cell"]), self._service.ranks())
        except (OSError, KeyError, psutil.Error):
            return None

    def _has_reached(self, stage: Stage, found: Processes, gone: Sequence[psutil.Process]) -> bool:
        if found.gateway in gone or found.agent in gone:
            return False
        if stage is Stage.STARTED:
            return True
        if len(found.ranks) < self._num_ranks or set(found.ranks) & set(gone):
            return False
        return stage is Stage.PEOPLED or self._is_ready()

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self._service.url}/readyz", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False


def _sigkill(process: psutil.Process) -> None:
    try:
        os.kill(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it was on its way out already
