"""The supervisor over stand-ins for gateway and cell: real processes, real signals, a real port."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from gateway import die_with_parent

PATIENCE_S = 120.0


def has_ended(pid: int, within_s: float = PATIENCE_S) -> bool:
    """Whether a process, of whatever parent, is gone or goes within that time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], within_s)[0])
    finally:
        os.close(descriptor)


def until(is_so: Callable[[], bool]) -> bool:
    """There is no event for what another process does to a file or a port."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_refused(url: str) -> bool:
    try:
        httpx.get(f"{url}/readyz", timeout=0.5)
    except httpx.ConnectError:
        return True
    except httpx.HTTPError:
        pass
    return False


class Service:
    """A supervisor under test; what its children tell comes in order through a fifo."""

    def __init__(self, directory: Path, kinds: str, stop_grace_s: float) -> None:
        self.directory = directory
        os.mkfifo(directory / "events")
        # Open for writing as well, so that the fifo does not end between two writers.
        self._events = os.fdopen(os.open(directory / "events", os.O_RDWR), "rb", buffering=0)
        command = [sys.executable, "-m", "tests.gateway.stand_in", "supervisor", str(directory), kinds]
        self.process = subprocess.Popen(
            [*command, str(stop_grace_s)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.pids: set[int] = set()
        self._waiting: list[str] = []

    def event(self, name: str) -> list[int]:
        """The numbers of the next event of that name; others stay to be asked for."""
        return [int(word) for word in self.told(name) if word.isdigit()]

    def told(self, name: str) -> list[str]:
        """The words of that event."""
        for place, told in enumerate(self._waiting):
            if told.startswith(name):
                return self._words(self._waiting.pop(place))
        while True:
            assert select.select([self._events], [], [], PATIENCE_S)[0], f"{name!r} was never told"
            told = self.next_event()
            if told.startswith(name):
                return self._words(told)
            self._waiting.append(told)

    def next_event(self) -> str:
        line = b""
        while not line.endswith(b"\n"):
            line += self._events.read(1)
        return line.decode().strip()

    def _words(self, told: str) -> list[str]:
        words = told.split()
        self.pids.update(int(word) for word in words if word.isdigit())
        return words

    def ready_url(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().removeprefix("cellgate ready ").strip()

    def finish(self) -> tuple[int, str, str]:
        """Exit status, the rest of stdout, the whole of stderr."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        for pid in self.pids:
            if not has_ended(pid, within_s=2.0):
                os.kill(pid, signal.SIGKILL)
        self._events.close()


@pytest.fixture
def service(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Service]:
    kinds, stop_grace_s = getattr(request, "param", ("plain", PATIENCE_S))
    running = Service(tmp_path, kinds, stop_grace_s)
    yield running
    running.close()


def of_kind(kinds: str, stop_grace_s: float = PATIENCE_S) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("service", [(kinds, stop_grace_s)], indirect=True, ids=[kinds])


def test_it_says_ready_once_and_stops_the_gateway_before_the_cell(service: Service) -> None:
    url = service.ready_url()
    assert httpx.get(f"{url}/readyz").status_code == 200
    [gateway], [cell, rank] = service.event("gateway"), service.event("cell")
    pids = json.loads((service.directory / "run/pids.json").read_text())
    assert pids == {"supervisor": service.process.pid, "gateway": gateway, "cell": cell}

    service.process.send_signal(signal.SIGTERM)
    assert [service.next_event() for _ in range(2)] == ["gateway stops", "cell stops"]
    status, out, err = service.finish()
    assert (status, out) == (0, ""), err
    assert all(has_ended(pid, 0.0) for pid in (gateway, cell, rank))
    assert not (service.directory / "run/pids.json").exists()


def test_a_killed_gateway_comes_back_at_the_same_address_while_the_cell_stays(service: Service) -> None:
    url = service.ready_url()
    [gateway], [cell, _] = service.event("gateway"), service.event("cell")
    os.kill(gateway, signal.SIGKILL)
    # Nobody is refused in between: the listening socket is the supervisor's.
    assert httpx.get(f"{url}/readyz", timeout=PATIENCE_S).status_code == 200
    [successor] = service.event("gateway")
    assert successor != gateway
    assert not has_ended(cell, 0.0)
    service.process.send_signal(signal.SIGTERM)
    assert service.finish()[:2] == (0, "")


@of_kind("strays")
def test_a_killed_cell_is_started_again_and_its_left_over_ranks_are_ended(service: Service) -> None:
    service.ready_url()
    [gateway], [cell, rank] = service.event("gateway"), service.event("cell")
    os.kill(cell, signal.SIGKILL)
    successor, next_rank = service.event("cell")
    assert successor != cell
    assert has_ended(rank, 0.0), "a new epoch must not start beside ranks of the old one"
    assert not has_ended(gateway, 0.0)
    service.process.send_signal(signal.SIGTERM)
    assert service.finish()[:2] == (0, "")
    assert has_ended(next_rank, 0.0)


def test_nothing_outlives_a_killed_supervisor(service: Service) -> None:
    service.ready_url()
    children = service.event("gateway") + service.event("cell")
    service.process.kill()
    assert all(has_ended(pid) for pid in children)


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_only_a_wrapped_child_dies_with_a_killed_parent(is_wrapped: bool) -> None:
    wrapper = f"[sys.executable, {die_with_parent.__file__!r}, str(os.getpid())]" if is_wrapped else "[]"
    start = f"import os, subprocess, sys; p = subprocess.Popen({wrapper} + ['sh', '-c', 'echo $$; exec sleep 600'])"
    parent = subprocess.Popen([sys.executable, "-c", f"{start}; p.wait()"], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert has_ended(child, PATIENCE_S if is_wrapped else 0.3) is is_wrapped
    if not is_wrapped:
        os.kill(child, signal.SIGKILL)


@of_kind("broken_cell")
def test_a_cell_that_never_gets_ready_ends_the_service_with_its_reason(service: Service) -> None:
    status, out, err = service.finish()
    assert (status, out) == (1, "")
    assert "the cell ended 3 times before it was ready (exit status 3):\nthere is no such device" in err
    assert err.count("cell | there is no such device") == 3
    [gateway] = service.event("gateway")
    assert has_ended(gateway, 0.0)


def test_a_cell_that_was_ready_once_and_cannot_start_any_more_is_not_started_for_ever(service: Service) -> None:
    service.ready_url()
    pid, _ = service.event("cell ")
    (service.directory / "cell_is_ready").unlink()
    (service.directory / "device_is_gone").touch()
    os.kill(pid, signal.SIGKILL)
    status, _, err = service.finish()
    assert status == 1
    assert "the cell ended 10 times before it was ready (exit status 3):\nthere is no such device" in err
    assert err.count("cell | there is no such device") == 9


@of_kind("broken_gateway")
def test_a_gateway_that_never_answers_ends_the_service_with_its_reason(service: Service) -> None:
    status, out, err = service.finish()
    assert (status, out) == (1, "")
    assert "the gateway ended 3 times before it was ready (exit status 3):\nthere is no such device" in err


@of_kind("unwilling")
def test_a_gateway_that_would_end_the_same_way_again_ends_the_service_at_once_with_its_reason(service: Service) -> None:
    status, out, err = service.finish()
    assert (status, out) == (1, "")
    assert err.splitlines()[-1] == "cellgate: the checkpoint is over other weights"
    assert "starting it again" not in err


def test_only_the_gateways_of_a_start_are_told_what_to_start_with(service: Service) -> None:
    service.ready_url()
    told = service.told("gateway")
    os.kill(int(told[1]), signal.SIGKILL)
    assert told[2:] == ["--first"]
    assert service.told("gateway")[2:] == []


@of_kind("broken_base")
def test_a_base_model_that_cannot_be_prepared_ends_the_service_with_its_reason(service: Service) -> None:
    status, out, err = service.finish()
    assert (status, out) == (1, "")
    assert "the base model cannot be prepared (exit status 3):\nthere is no such device" in err


@of_kind("stubborn", stop_grace_s=0.5)
def test_what_does_not_stop_in_the_grace_period_is_killed(service: Service) -> None:
    service.ready_url()
    [cell, rank] = service.event("cell")
    service.process.send_signal(signal.SIGTERM)
    status, _, err = service.finish()
    assert status == 0
    assert "cell has not stopped" in err
    assert has_ended(cell, 0.0)
    assert has_ended(rank, 0.0)


@of_kind("stubborn", stop_grace_s=600.0)
def test_while_only_the_cell_still_stops_clients_are_refused_and_not_kept_waiting(service: Service) -> None:
    url = service.ready_url()
    [cell, _] = service.event("cell")
    service.process.send_signal(signal.SIGTERM)
    service.event("gateway stops")
    assert until(lambda: is_refused(url))
    assert not has_ended(cell, 0.0)


def test_pids_that_could_not_be_recorded_are_as_soon_as_they_can(service: Service) -> None:
    service.ready_url()
    run, away = service.directory / "run", service.directory / "away"
    [gateway] = service.event("gateway")
    run.rename(away)
    os.kill(gateway, signal.SIGKILL)
    [successor] = service.event("gateway")
    away.rename(run)
    assert until(lambda: json.loads((run / "pids.json").read_text())["gateway"] == successor)
    service.process.send_signal(signal.SIGTERM)
    _, _, err = service.finish()
    assert "the pids cannot be recorded: " in err


@of_kind("stubborn", stop_grace_s=600.0)
def test_a_second_signal_kills_at_once(service: Service) -> None:
    service.ready_url()
    [cell, rank] = service.event("cell")
    service.process.send_signal(signal.SIGTERM)
    service.event("gateway stops")
    service.process.send_signal(signal.SIGTERM)
    assert service.finish()[0] == 128 + signal.SIGTERM
    assert has_ended(cell, 0.0)
    assert has_ended(rank, 0.0)
