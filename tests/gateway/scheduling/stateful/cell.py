"""A fake cell in simulated time: the models, checkpoints and memory of outcomes of the one that lives in a thread."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from tests.fakes.fake_cell import BASE
from tests.fakes.fake_model import FakeModel
from tests.fakes.fake_slots import FakeSlots
from tests.fakes.fake_vault import save_model
from tests.fakes.hold import Killed
from tests.gateway.scheduling.stateful.clock import Clock
from tests.gateway.scheduling.stateful.process import ProcessDisk
from tests.gateway.scheduling.stateful.wire import Connection
from trainer_cell.outcome_book import OutcomeBook
from trainer_cell.protocol.commands import (
    PROTOCOL_VERSION,
    Command,
    ForgetModels,
    ForwardBackward,
    ModelCommand,
    SaveState,
    Tick,
    decode_command,
)
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import Failed, Hello, Layout, Progress, ResidentModel, Said, Success, encode_said
from trainer_cell.vault.layout import Vault
from trainer_cell.vault.ulid import new_ulid

_BUFFERS = 2
_START_S, _REDIAL_S = 0.01, 0.05


class Gateways(Protocol):
    def dial(self, cell: SimulatedCell) -> Connection | None:
        """None while nobody listens."""

    def has_asked(self, command_id: str) -> bool:
        """Whether a client has asked for the command: it is none that brings a model back."""


class SimulatedCell:
    """command_s / publish_s: how long the next command, the next publish takes.

    die_at: it is killed before so many more calls to the disk. faults: so many forward_backwards to come fail by no
    fault of theirs; faulty: their ids. last_seen: models as they are, or were when they lost their slots.
    """

    def __init__(
        self,
        root: Path,
        clock: Clock,
        gateways: Gateways,
        slots: int,
        command_s: Callable[[], float],
        publish_s: Callable[[], float],
    ) -> None:
        self.die_at: int | None = None
        self.faults = 0
        self.faulty: set[str] = set()
        self.executed: list[Command] = []
        self.last_seen: dict[str, FakeModel] = {}
        self.is_alive = True
        self._clock, self._gateways = clock, gateways
        self._command_s, self._publish_s = command_s, publish_s
        self._disk = ProcessDisk(self._work)
        self._vault = Vault(root, self._disk)
        self._hello = Hello(
            PROTOCOL_VERSION, new_ulid(), Layout(1, 1, 1, 1), BASE, "fp32", True, False, False, slots, 64, ()
        )
        self.slots = FakeSlots(self._vault, self._hello)
        self._book = OutcomeBook()
        self._inbox: deque[tuple[Connection, bytes]] = deque()
        self._is_busy = False
        self._num_publishing = 0
        self._connection: Connection | None = None
        self._life = ExitStack()
        self._life.enter_context(self._vault.hold_epoch(self._hello.epoch))
        self._later(_START_S, self._dial)

    @property
    def epoch(self) -> str:
        return self._hello.epoch

    def kill(self, loses_all: bool = False) -> None:
        if self.is_alive:
            self.is_alive = False
            self._disk.end()
            self.drop_connection(loses_all)

    def drop_connection(self, loses_all: bool = False) -> None:
        """It breaks; a cell that lives dials again."""
        if self._connection is not None:
            self._connection.end_of_cell(loses_all)
            self.hung_up(self._connection)

    def _work(self) -> None:
        if not self.is_alive:
            raise Killed
        if self.die_at is not None:
            self.die_at -= 1
            if self.die_at <= 0:
                self.kill()
                raise Killed

    def _later(self, delay_s: float, act: Callable[[], None], in_thread: bool = False) -> None:
        def unless_dead() -> None:
            if self.is_alive:
                try:
                    act()
                except Killed:
                    self.kill()

        self._clock.later(delay_s, partial(self._clock.thread, unless_dead) if in_thread else unless_dead)

    # Its connection

    def _dial(self) -> None:
        """Between commands alone: rank 0 dials where it waits for the next one, which is after it took all that the
        last connection brought, so that a hello tells of every command either what came of it or nothing."""
        if self._connection is not None or self._is_busy:
            return
        connection = self._gateways.dial(self)
        if connection is None:
            self._later(_REDIAL_S, self._dial)
            return
        self._connection = connection
        resident = tuple(
            ResidentModel(model_id, model.adapter, model.step, model.iteration, model.turn)
            for model_id, model in self.slots.models.items()
        )
        hello = self._book.told_in(msgspec.structs.replace(self._hello, models=resident))
        connection.say(encode_said(hello))

    def hung_up(self, connection: Connection) -> None:
        if connection is self._connection:
            self._connection = None
            self._dial_if_free()

    def _dial_if_free(self) -> None:
        if self._connection is None and not self._is_busy:
            self._later(0.0, self._dial)

    def hear(self, connection: Connection, frame: bytes) -> None:
        if self.is_alive and connection is self._connection:
            self._inbox.append((connection, frame))
            self._go_on()

    def _say(self, said: Said) -> None:
        self._book.note(said)
        if self._connection is not None:
            self._connection.say(encode_said(said))

    # Its commands

    def _go_on(self) -> None:
        while self._inbox and not self._is_busy:
            connection, frame = self._inbox.popleft()
            receipt = self._book.receive(frame)
            if receipt.answer is not None and connection is self._connection:
                connection.say(encode_said(receipt.answer))
            command = decode_command(frame)
            if receipt.is_to_run and not isinstance(command, Tick):
                self._is_busy = True
                self._later(self._command_s(), lambda command=command: self._execute(command))  # type: ignore[misc]
        self._dial_if_free()

    def _execute(self, command: ModelCommand | ForgetModels) -> None:
        self.executed.append(command)
        self.last_seen |= self.slots.models
        self._is_busy = False
        try:
            if isinstance(command, ForwardBackward) and self.faults and self._gateways.has_asked(command.command_id):
                self.faults -= 1
                self.faulty.add(command.command_id)
                raise CommandFailed(ErrorKind.RANK_FAILED, "by no fault of its own")
            if isinstance(command, SaveState):
                self._capture(command)
            else:
                self._say(self.slots.execute(command, self._say))
        except CommandFailed as failure:
            self._say(Failed(command.command_id, failure.kind, failure.message))
        self._go_on()

    def _capture(self, command: SaveState) -> None:
        captured = copy.copy(self.slots.model(command))
        if self._num_publishing == _BUFFERS:
            raise CommandFailed(ErrorKind.SAVE_BUFFERS_FULL, "all buffers are in use")
        self._num_publishing += 1
        self._say(Progress(command.command_id, "capturing", 0, 0))
        self._say(Progress(command.command_id, "writing", 0, 1))

        def publish() -> None:
            try:
                outcome: Success | Failed = save_model(self._vault, self._hello, captured, command, self._say)
            except CommandFailed as failure:
                outcome = Failed(command.command_id, failure.kind, failure.message)
            self._num_publishing -= 1
            self._say(outcome)

        self._later(self._publish_s(), publish, in_thread=True)
