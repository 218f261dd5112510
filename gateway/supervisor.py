"""Keeps a gateway and a trainer cell running on this host, and leaves nothing behind.

Either is started again, with growing pauses, when it ends; only this process's end ends both. One that ends three
times in a row before it ever was ready will not get better by itself, and ends the service with its last words; one
that was ready before is given ten tries. What the service has accepted is in its journal all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import httpx

from gateway.child_process import ChildProcess, log
from gateway.exit_status import NOT_AGAIN
from gateway.orphans import adopt_orphans, kill_orphans
from gateway.state_directory import StateDirectory

_HOPELESS = 3
_HOPELESS_LATER = 10
_LONGEST_PAUSE_S = 30.0
_POLL_S = 0.1
_RECORD_AGAIN_S = 1.0


@dataclass(frozen=True)
class Plan:
    """What to run.

    prepare: prints the base model's directory as its last line; run once, before the first cell.
    cell: that directory → the command of the cell.
    start_up: further options of the gateway until the service is ready for the first time. A gateway after that one
        has none of the models its predecessor had, the first one neither: it would be back where it started.
    listener: file descriptor of the listening socket, which only the gateway inherits; it stays open between two
        gateways, so that a client in that gap waits and is not refused.
    url: where clients reach the gateway; probe_url: where this process does.
    """

    gateway: list[str]
    prepare: list[str]
    cell: Callable[[str], list[str]]
    listener: int
    url: str
    probe_url: str
    gateway_environment: Mapping[str, str]
    cell_environment: Mapping[str, str]
    stop_grace_s: float
    start_up: tuple[str, ...] = ()
    first_pause_s: float = 0.2


class GivenUp(Exception):
    """A child that will not run; the message is for the operator."""


class Supervisor:
    """One run of `cellgate serve`; `run()` is called once."""

    def __init__(self, plan: Plan, state: StateDirectory) -> None:
        self._plan = plan
        self._state = state
        self._children: dict[str, ChildProcess] = {}
        self._stop_asked = asyncio.Event()
        self._killed_by: int | None = None
        self._is_announced = False
        self._are_pids_recorded = True

    async def run(self) -> int:
        """Serve until told to stop; the exit status: 0 after an orderly stop, 1 when given up."""
        adopt_orphans()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        given_up: GivenUp | None = None
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
                await self._keep_both(client)
        except GivenUp as reason:
            given_up = reason
        finally:
            await self._stop_children()
            self._state.clear_run()
        if given_up:
            # Told last, where it is not buried under what the others say when they are stopped.
            log(f"cellgate: {given_up}")
            return 1
        return 128 + self._killed_by if self._killed_by else 0

    def _on_signal(self, number: int) -> None:
        if not self._stop_asked.is_set():
            log(f"cellgate: stopping ({signal.Signals(number).name}); once more to kill")
            self._stop_asked.set()
            return
        self._killed_by = number
        for child in self._children.values():
            child.kill()

    async def _keep_both(self, client: httpx.AsyncClient) -> None:
        """Until a stop is asked for; raises `GivenUp`. The children still run when it returns."""
        keepers = [
            asyncio.create_task(
                self._keep("gateway", self._start_gateway, lambda: self._probe(client, is_ready=False))
            ),
            asyncio.create_task(self._keep_cell(client)),
            asyncio.create_task(self._keep_record()),
        ]
        stop = asyncio.create_task(self._stop_asked.wait())
        try:
            await asyncio.wait([*keepers, stop], return_when=asyncio.FIRST_COMPLETED)
            for keeper in keepers:
                if keeper.done():
                    keeper.result()
        finally:
            for task in (*keepers, stop):
                task.cancel()
            await asyncio.gather(*keepers, stop, return_exceptions=True)

    async def _keep_cell(self, client: httpx.AsyncClient) -> None:
        child = self._start("prepare_base", self._plan.prepare, self._plan.cell_environment)
        if status := await self._until_ended("prepare_base", child):
            raise GivenUp(f"the base model cannot be prepared ({_said(status)}):\n{child.last_words}")
        command = self._plan.cell(child.last_line)

        async def announced() -> None:
            await self._probe(client, is_ready=True)
            self._announce()

        await self._keep("cell", lambda: self._start("cell", command, self._plan.cell_environment), announced)

    async def _keep(
        self, name: str, start: Callable[[], ChildProcess], until_ready: Callable[[], Awaitable[None]]
    ) -> None:
        """Start a child again and again; `until_ready` returns once the present one serves."""
        num_failed, was_ever_ready = 0, False
        while True:
            child = start()
            ready = asyncio.ensure_future(until_ready())
            try:
                status = await self._until_ended(name, child)
            finally:
                ready.cancel()
                await asyncio.wait([ready])
            if status == NOT_AGAIN:
                raise GivenUp(child.last_words.rpartition("\n")[2].removeprefix("cellgate: "))
            if not ready.cancelled():
                ready.result()
                num_failed, was_ever_ready = 0, True
            num_failed += 1
            if num_failed >= (_HOPELESS_LATER if was_ever_ready else _HOPELESS):
                last_words = child.last_words or "(it said nothing)"
                raise GivenUp(
                    f"the {name} ended {num_failed} times before it was ready ({_said(status)}):\n{last_words}"
                )
            pause_s = min(self._plan.first_pause_s * 2 ** (num_failed - 1), _LONGEST_PAUSE_S)
            log(f"cellgate: the {name} has ended ({_said(status)}); starting it again in {pause_s:.1f} s")
            await asyncio.sleep(pause_s)

    def _start_gateway(self) -> ChildProcess:
        plan = self._plan
        command = plan.gateway if self._is_announced else [*plan.gateway, *plan.start_up]
        return self._start("gateway", command, plan.gateway_environment, pass_fds=(plan.listener,))

    def _start(
        self, name: str, command: list[str], environment: Mapping[str, str], pass_fds: tuple[int, ...] = ()
    ) -> ChildProcess:
        child = self._children[name] = ChildProcess(name, command, environment, pass_fds)
        self._write_pids()
        return child

    async def _until_ended(self, name: str, child: ChildProcess) -> int:
        status = await child.wait()
        del self._children[name]
        self._sweep()
        self._write_pids()
        return status

    def _write_pids(self) -> None:
        running = {name: child.pid for name, child in self._children.items()}
        try:
            self._state.write_pids({"supervisor": os.getpid(), **running})
        except OSError as error:
            if self._are_pids_recorded:
                log(f"cellgate: the pids cannot be recorded: {error}")
            self._are_pids_recorded = False
        else:
            self._are_pids_recorded = True

    async def _keep_record(self) -> None:
        """A volume that was full may have room again."""
        while True:
            await asyncio.sleep(_RECORD_AGAIN_S)
            if not self._are_pids_recorded:
                self._write_pids()

    def _sweep(self) -> None:
        """End what a dead child left running: an agent that was killed cannot end its ranks."""
        if num_killed := kill_orphans(spare={child.pid for child in self._children.values()}):
            log(f"cellgate: {num_killed} processes were left over and are killed")

    async def _probe(self, client: httpx.AsyncClient, *, is_ready: bool) -> None:
        """Return when the gateway answers at all, or, with `is_ready`, that requests will be served."""
        while True:
            with contextlib.suppress(httpx.HTTPError):
                answer = await client.get(f"{self._plan.probe_url}/readyz")
                if answer.status_code == 200 or not is_ready:
                    return
            await asyncio.sleep(_POLL_S)

    def _announce(self) -> None:
        if not self._is_announced:
            self._is_announced = True
            with contextlib.suppress(OSError):
                sys.stdout.write(f"cellgate ready {self._plan.url}\n")
                sys.stdout.flush()

    async def _stop_children(self) -> None:
        """The gateway first, so that it can finish what the ranks are at; then the cell."""
        deadline = time.monotonic() + self._plan.stop_grace_s
        for name, share in (("prepare_base", 0.0), ("gateway", 0.6), ("cell", 1.0)):
            if child := self._children.get(name):
                grace_s = deadline - time.monotonic() - (1 - share) * self._plan.stop_grace_s
                await child.stop(max(grace_s, 0.0))
                del self._children[name]
            if name == "gateway":
                self._stop_listening()
        self._sweep()

    def _stop_listening(self) -> None:
        """Nobody will answer any more: better refused than kept waiting."""
        with socket.socket(fileno=os.dup(self._plan.listener)) as listener:
            listener.shutdown(socket.SHUT_RDWR)


def _said(status: int) -> str:
    return f"exit status {status}" if status >= 0 else signal.Signals(-status).name
