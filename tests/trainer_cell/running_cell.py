"""Whole cells for tests, there in about a second; the test is their gateway, at the other end of a real socket."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

from pydantic_settings import CliApp

from tests.trainer_cell.forked_ranks import PATIENCE_S, logs_of, start_ranks
from trainer_cell.protocol.commands import Acknowledge, Command, SaveState, encode_command
from trainer_cell.protocol.framing import FrameError, receive_frame, send_frame
from trainer_cell.protocol.outcomes import Failed, Hello, Outcome, Progress, Success, decode_said
from trainer_cell.settings import CellSettings
from trainer_cell.vault.layout import Vault

# What torchrun does with the ranks that are left when one has failed, in less time.
GRACE_S = 5.0

T = TypeVar("T")
Disturb = Callable[[int], None]


class CellEnded(Exception):
    """The cell hung up; how each of its ranks ended is in `statuses`."""

    def __init__(self, statuses: list[int], log: str) -> None:
        super().__init__(f"exit statuses {statuses}\n{log}")
        self.statuses = statuses


class RunningCell:
    """One epoch. disturb: called on each rank, with its number, before the cell is built there.

    hello: what the cell said when it dialled last.
    """

    def __init__(
        self,
        base: Path,
        checkpoints: Path,
        *options: str,
        ranks: int = 1,
        tp: int = 1,
        pp: int = 1,
        disturb: Disturb | None = None,
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="cell-"))
        Vault(checkpoints).create()
        path = self.directory / "socket"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        given = ["--base-model", str(base), "--checkpoints", str(checkpoints), "--gateway-socket", str(path)]
        given += ["--tp", str(tp), "--pp", str(pp), "--threads", "1", *options]
        self.processes = start_ranks(ranks, self.directory, _run, (given, disturb))
        self._outcomes: dict[str, Success | Failed] = {}
        self._accept()

    def _accept(self) -> None:
        if self._listener not in wait([self._listener, *(one.sentinel for one in self.processes)], PATIENCE_S):
            raise CellEnded(self._await_end(), self.log())
        self._connection, _ = self._listener.accept()
        self._connection.settimeout(PATIENCE_S)
        hello = self._next()
        assert isinstance(hello, Hello)
        self.hello = hello

    def hang_up(self) -> None:
        """As a gateway that dies: what the cell says from here on, nobody hears."""
        self._connection.close()

    def come_back(self) -> Hello:
        """As the next gateway: it knows nothing but what it is told."""
        self._outcomes.clear()
        self._accept()
        return self.hello

    def acknowledge(self, *command_ids: str) -> None:
        self.send(Acknowledge(command_ids))

    def execute(self, command: Command) -> Success | Failed:
        """The outcome; progress is passed over. Raises `CellEnded`, and `TimeoutError` if the cell hangs."""
        self.send(command)
        return self.outcome_of(command)

    def capture(self, command: SaveState) -> Progress | Outcome:
        """Send a save, and wait until the ranks are free of it; what the cell said then."""
        self.send(command)
        while True:
            said = self._next()
            assert not isinstance(said, Hello)
            if said.command_id == command.command_id and getattr(said, "phase", None) != "capturing":
                return said
            self._keep(said)

    def outcome_of(self, command: Command) -> Success | Failed:
        """Of a command that was sent."""
        command_id = command.command_id  # type: ignore[union-attr]
        while command_id not in self._outcomes:
            self._keep(self._next())
        return self._outcomes.pop(command_id)

    def send(self, command: Command) -> None:
        try:
            send_frame(self._connection, encode_command(command))
        except OSError:
            raise CellEnded(self._await_end(), self.log()) from None

    def _keep(self, said: Hello | Progress | Outcome) -> None:
        assert not isinstance(said, Hello)
        if not isinstance(said, Progress):
            self._outcomes[said.command_id] = said

    def do(self, command: Command, expected: type[T]) -> T:
        """The outcome of a command that must succeed."""
        outcome = self.execute(command)
        assert isinstance(outcome, expected), outcome
        return outcome

    def log(self) -> str:
        return logs_of(self.directory)

    def stop(self) -> list[int]:
        """As `cellgate serve` stops a cell; the ranks' exit statuses."""
        pid = self.processes[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        return self._await_end()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self._connection.close()
        self._listener.close()
        shutil.rmtree(self.directory)

    def _next(self) -> Hello | Progress | Outcome:
        self._tend_until(lambda: bool(wait([self._connection], timeout=0)), self._connection)
        try:
            frame = receive_frame(self._connection)
        except (ConnectionError, FrameError):
            frame = None
        if frame is None:
            raise CellEnded(self._await_end(), self.log())
        return decode_said(frame)

    def _await_end(self) -> list[int]:
        self._tend_until(lambda: not self._alive())
        return [process.exitcode or 0 for process in self.processes]

    def _tend_until(self, is_over: Callable[[], bool], *events: socket.socket) -> None:
        """Once a rank has failed, the others have their grace and are then killed, as torchrun does it."""
        deadline, is_failing = time.monotonic() + PATIENCE_S, False
        while not is_over():
            if not is_failing and any(process.exitcode for process in self.processes):
                deadline, is_failing = time.monotonic() + GRACE_S, True
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                if not is_failing:
                    raise TimeoutError(f"nothing came of it, and no rank has ended\n{self.log()}")
                for process in self._alive():
                    process.kill()
            # The last may have ended since it was asked for.
            if awaited := [*events, *(process.sentinel for process in self._alive())]:
                wait(awaited, max(left_s, 0.1))

    def _alive(self) -> list[BaseProcess]:
        return [process for process in self.processes if process.exitcode is None]


@contextmanager
def running_cell(*arguments: object, **options: object) -> Iterator[RunningCell]:
    cell = RunningCell(*arguments, **options)  # type: ignore[arg-type]
    try:
        yield cell
    finally:
        cell.close()


def _run(options: list[str], disturb: Disturb | None) -> None:
    from trainer_cell.assembly import run_cell

    if disturb is not None:
        disturb(int(os.environ["RANK"]))
    run_cell(CliApp.run(CellSettings, cli_args=options))
