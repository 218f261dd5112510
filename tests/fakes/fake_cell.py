"""A trainer cell without torch: real frames over the real socket, real checkpoints, models of one number each.

It runs in a thread of its own with blocking calls, as rank 0 does, so that tests of any kind can use it: with an event
loop, with several, or with none.
"""

from __future__ import annotations

import copy
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import msgspec

from tests.fakes.fake_link import FakeLink
from tests.fakes.fake_slots import FakeSlots
from tests.fakes.fake_vault import WatchedDisk, bytes_of, save_model
from tests.fakes.hold import PATIENCE_S, Hold, Killed
from trainer_cell.protocol.commands import (
    PROTOCOL_VERSION,
    Acknowledge,
    Command,
    ForgetModels,
    ModelCommand,
    SaveState,
    Stop,
    Tick,
    decode_command,
)
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.framing import receive_frame
from trainer_cell.protocol.outcomes import (
    BaseModel,
    Failed,
    Hello,
    Layout,
    Progress,
    ResidentModel,
    Success,
)
from trainer_cell.vault.layout import Vault
from trainer_cell.vault.ulid import new_ulid

__all__ = ["BASE", "PATIENCE_S", "FakeCell", "Hold"]

BASE = BaseModel("cellgate/tiny", ("tiny",), "0" * 32, None, 512, 2048)
_REDIAL_S = 0.01


class FakeCell:
    """Dials `socket_path` once started, and again whenever it is hung up on; checkpoints go under `root`.

    commands: everything it was told, in order, acknowledgements aside; executed: what of that it ran, and did not
    know already. slots: its models. hello_was_refused: set when a connection ended before any command.
    """

    def __init__(
        self,
        socket_path: Path,
        root: Path,
        *,
        base_model: BaseModel = BASE,
        slots: int = 8,
        max_lora_rank: int = 64,
        no_load_optim: bool = False,
        no_save_optim: bool = False,
        protocol_version: int = PROTOCOL_VERSION,
        save_buffers: int = 8,
    ) -> None:
        self.commands: list[Command] = []
        self.executed: list[ModelCommand | ForgetModels] = []
        self.hello_was_refused = threading.Event()
        self._link = FakeLink(socket_path, self._check_alive)
        self._hello = Hello(
            protocol_version=protocol_version,
            epoch=new_ulid(),
            layout=Layout(1, 1, 1, 1),
            base_model=base_model,
            dtype="fp32",
            deterministic=True,
            no_load_optim=no_load_optim,
            no_save_optim=no_save_optim,
            slots=slots,
            max_lora_rank=max_lora_rank,
            models=(),
        )
        self._vault = Vault(root, WatchedDisk(self._on_disk_call))
        self.slots = FakeSlots(self._vault, self._hello)
        self._failures: list[tuple[type[ModelCommand], CommandFailed]] = []
        self._holds: list[tuple[type[ModelCommand], Hold]] = []
        self._publish_holds: list[Hold] = []
        self._save_buffers = save_buffers
        self._num_publishing = 0
        self._deadly: tuple[str, str] | None = None
        self._deadly_answer: type[ModelCommand] | None = None
        self._is_killed = threading.Event()
        self._thread = threading.Thread(target=self._live, name="fake cell", daemon=True)

    # For tests

    @property
    def epoch(self) -> str:
        return self._hello.epoch

    def start(self) -> Self:
        self._thread.start()
        return self

    def kill(self) -> None:
        """As SIGKILL: whatever it does ends now, and its connection with it."""
        self._is_killed.set()
        for hold in (*self._publish_holds, *(hold for _, hold in self._holds)):
            hold.release()
        self._link.shut_down()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def drop_connection(self) -> None:
        """The connection breaks, the cell lives and dials again."""
        self._link.shut_down()

    def fail_next(self, kind: type[ModelCommand], error: CommandFailed) -> None:
        """The next command of that kind fails so, with nothing changed."""
        self._failures.append((kind, error))

    def hold_next(self, kind: type[ModelCommand], after: int = 0) -> Hold:
        """Stop before executing the next command of that kind, or the one that comes after so many more."""
        hold = Hold()
        hold.num_to_pass = after
        self._holds.append((kind, hold))
        return hold

    def hold_next_publish(self) -> Hold:
        """Of the saves to come the next is published in the background, and stops before it."""
        hold = Hold()
        self._publish_holds.append(hold)
        return hold

    def die_before(self, operation: str, path_part: str) -> None:
        """Be killed just before the vault's first disk call `operation` on a path that has `path_part` in it."""
        self._deadly = (operation, path_part)

    def die_before_answering(self, kind: type[ModelCommand]) -> None:
        """Execute the next command of that kind and be killed before its outcome is told."""
        self._deadly_answer = kind

    def count_saves(self, model_id: str) -> int:
        """Of checkpoints that somebody asked for: snapshots come when they come."""
        saves = (command for command in self.commands if isinstance(command, SaveState))
        return sum(save.model_id == model_id and save.kind != "recovery" for save in saves)

    def count(self, kind: type[ModelCommand] | type[ForgetModels]) -> int:
        return sum(isinstance(command, kind) for command in self.commands)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    # Its life

    def _live(self) -> None:
        try:
            with self._vault.hold_epoch(self._hello.epoch):
                while not self._is_killed.is_set():
                    self._dial_and_serve()
                    self._is_killed.wait(_REDIAL_S)
        except Killed:
            pass
        finally:
            self._link.shut_down()

    def _dial_and_serve(self) -> None:
        with suppress(OSError), self._link.dialled(self._hello_now) as connection:
            self._serve(connection)

    def _hello_now(self) -> Hello:
        resident = tuple(
            ResidentModel(model_id, model.adapter, model.step, model.iteration, model.turn)
            for model_id, model in self.slots.models.items()
        )
        return msgspec.structs.replace(self._hello, models=resident)

    def _serve(self, connection: socket.socket) -> None:
        num_served = 0
        while (frame := receive_frame(connection)) is not None:
            num_served += 1
            command = decode_command(frame)
            if not isinstance(command, Acknowledge):
                self.commands.append(command)
            if isinstance(command, Stop):
                raise Killed
            if self._link.is_to_run(frame) and not isinstance(command, Acknowledge | Tick):
                self._execute(command)
        if num_served == 0:
            self.hello_was_refused.set()

    def _execute(self, command: ModelCommand | ForgetModels) -> None:
        self.executed.append(command)
        outcome = self._answer(command)
        if self._deadly_answer is not None and isinstance(command, self._deadly_answer):
            self._die()
        if outcome is not None:
            self._link.say(outcome)

    def _check_alive(self) -> None:
        if self._is_killed.is_set():
            raise Killed

    def _on_disk_call(self, operation: str, path: Path) -> None:
        self._check_alive()
        if self._deadly is not None and self._deadly[0] == operation and self._deadly[1] in str(path):
            self._die()

    def _die(self) -> NoReturn:
        self._is_killed.set()
        self._link.shut_down()
        raise Killed

    # Commands

    def _answer(self, command: ModelCommand | ForgetModels) -> Success | Failed | None:
        for index, (kind, hold) in enumerate(self._holds):
            if isinstance(command, kind):
                hold.num_to_pass -= 1
                if hold.num_to_pass >= 0:
                    continue
                hold.stop_here()
                self._check_alive()
                del self._holds[index]
                break
        try:
            for index, (kind, error) in enumerate(self._failures):
                if isinstance(command, kind):
                    del self._failures[index]
                    raise error
            if isinstance(command, SaveState) and self._num_publishing >= self._save_buffers:
                raise CommandFailed(ErrorKind.SAVE_BUFFERS_FULL, "all buffers are in use")
            if isinstance(command, SaveState) and (hold := next(self._fresh_holds(), None)) is not None:
                self._publish_later(command, hold)
                return None
            return self.slots.execute(command, self._link.say)
        except CommandFailed as failure:
            return Failed(command.command_id, failure.kind, failure.message)

    def _fresh_holds(self) -> Iterator[Hold]:
        return (hold for hold in self._publish_holds if not hold.is_taken)

    def _publish_later(self, command: SaveState, hold: Hold) -> None:
        hold.is_taken = True
        captured = copy.copy(self.slots.model(command))
        self._num_publishing += 1

        def publish() -> None:
            try:
                hold.stop_here()
                self._check_alive()
                outcome: Success | Failed = save_model(self._vault, self._hello, captured, command, self._link.say)
            except CommandFailed as failure:
                outcome = Failed(command.command_id, failure.kind, failure.message)
            except Killed:
                return
            self._num_publishing -= 1
            self._link.say(outcome)

        self._link.say(Progress(command.command_id, "writing", 0, bytes_of(captured, command, self._hello)))
        threading.Thread(target=publish, name="fake publish", daemon=True).start()
