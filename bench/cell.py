"""A cell of real ranks, with the bench as its gateway at the other end of the socket."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

from trainer_cell.protocol.commands import (
    AdapterSpec,
    Command,
    CreateModel,
    DiscardGradients,
    LoadState,
    SaveState,
    encode_command,
)
from trainer_cell.protocol.framing import receive_frame, send_frame
from trainer_cell.protocol.outcomes import Failed, Hello, ModelCreated, Outcome, Progress, StateSaved, decode_said
from trainer_cell.vault.layout import Vault
from trainer_cell.watchdog import die_with_parent

_PATIENCE_S = 300.0
# The largest states on the smallest base.
_MOST_RANK = 20_000

T = TypeVar("T")
Disturb = Callable[[int], None]
_numbers = itertools.count()
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "trainer_cell.assembly", __name__])


class BenchCell:
    """Commands go out without waiting for answers, so that it shows when the cell comes to which."""

    def __init__(self, connection: socket.socket, vault: Vault) -> None:
        self.vault = vault
        self._connection = connection
        self._connection.settimeout(_PATIENCE_S)
        self._answers: dict[str, Outcome] = {}
        self._writing: set[str] = set()
        hello = self._receive()
        assert isinstance(hello, Hello)

    def send(self, command: Command) -> None:
        send_frame(self._connection, encode_command(command))

    def wait(self, command: Command) -> Outcome:
        """Until this command is answered, whatever else is said meanwhile."""
        command_id: str = getattr(command, "command_id")  # noqa: B009  # ticks have none, and are not sent
        while command_id not in self._answers:
            self._receive()
        return self._answers.pop(command_id)

    def wait_writing(self, save: SaveState) -> None:
        """Until the cell says that the save writes, or has ended."""
        while save.command_id not in self._writing and save.command_id not in self._answers:
            self._receive()

    def is_answered(self, command: SaveState) -> bool:
        return command.command_id in self._answers

    def do(self, command: Command, expected: type[T]) -> T:
        self.send(command)
        outcome = self.wait(command)
        assert isinstance(outcome, expected), outcome
        return outcome

    def fail(self, command: Command) -> Failed:
        return self.do(command, Failed)

    def create(self, model_id: str, rank: int) -> AdapterSpec:
        spec = AdapterSpec(rank, 32.0, train_attn=True, train_mlp=True, train_unembed=False)
        self.do(CreateModel(new_id(), model_id, spec, 1), ModelCreated)
        return spec

    def rank_of(self, num_bytes: int) -> int:
        """That of an adapter whose whole training state has about so many bytes in FP32."""
        spec = AdapterSpec(1, 32.0, train_attn=True, train_mlp=True, train_unembed=False)
        created = self.do(CreateModel(new_id(), f"probe-{new_id()}", spec, 1), ModelCreated)
        return max(1, round(num_bytes / (12 * created.num_parameters)))

    def files_of(self, saved: StateSaved) -> list[Path]:
        return sorted(self.vault.version_dir(saved.version).iterdir())

    def _receive(self) -> Hello | Progress | Outcome:
        frame = receive_frame(self._connection)
        assert frame is not None, "the cell has ended"
        said = decode_said(frame)
        if isinstance(said, Progress):
            if said.phase == "writing":
                self._writing.add(said.command_id)
        elif not isinstance(said, Hello):
            self._answers[said.command_id] = said
        return said


@contextmanager
def cell(directory: Path, base_model: str, ranks: int, disturb: Disturb | None = None) -> Iterator[BenchCell]:
    """A cell of `ranks` data-parallel ranks that share the cores; logs are in `directory`."""
    vault = Vault(directory / "vault")
    vault.create()
    address = directory / "socket"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen(1)
    listener.settimeout(_PATIENCE_S)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    options = ["--base-model", base_model, "--checkpoints", str(vault.root), "--gateway-socket", str(address)]
    options += ["--max-lora-rank", str(_MOST_RANK)]
    processes: list[BaseProcess] = [
        _context.Process(target=_rank, args=(rank, ranks, port, directory, options, disturb), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        with listener:
            connection, _ = listener.accept()
        with connection:
            yield BenchCell(connection, vault)
    finally:
        for process in processes:
            process.kill()
            process.join()
        address.unlink()


def new_id() -> str:
    return f"bench-{next(_numbers)}"


def save_command(model_id: str) -> SaveState:
    return SaveState(
        new_id(),
        model_id,
        name="bench",
        kind="weights",
        overwrite=True,
        include_optimizer=True,
        tenant_digest="bench",
        created="2026-01-01T00:00:00Z",
        expires=None,
        user_metadata={},
    )


def load_command(model_id: str, saved: StateSaved, spec: AdapterSpec) -> LoadState:
    return LoadState(new_id(), model_id, saved.version, spec, True)


def nothing(model_id: str) -> DiscardGradients:
    """The command that does least."""
    return DiscardGradients(new_id(), model_id)


def _rank(rank: int, world: int, port: int, directory: Path, options: list[str], disturb: Disturb | None) -> None:
    die_with_parent()
    log = os.open(directory / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    from pydantic_settings import CliApp

    from trainer_cell.assembly import run_cell
    from trainer_cell.settings import CellSettings

    if disturb is not None:
        disturb(rank)
    run_cell(CliApp.run(CellSettings, cli_args=options))
