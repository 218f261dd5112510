"""What a cell has said and its gateway may not have heard: outcomes until they are acknowledged, and the saves whose
outcomes are still to come.

A command may be sent once more by a gateway that was not there for its outcome. It is never run twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from trainer_cell.protocol.commands import Acknowledge, decode_command
from trainer_cell.protocol.outcomes import Hello, Outcome, Progress, Said


class _Heading(msgspec.Struct):
    """What tells of a command whether it is known. The rest, which may be megabytes, is skipped."""

    command: str
    command_id: str | None = None


_heading_decoder = msgspec.msgpack.Decoder(_Heading)


@dataclass(frozen=True)
class Receipt:
    """is_to_run: the command is new. answer: it is not, and this came of it."""

    is_to_run: bool
    answer: Outcome | None = None


class OutcomeBook:
    """Holds what is not acknowledged, and nothing else. One thread at a time: who uses it sees to that."""

    def __init__(self) -> None:
        self._outcomes: dict[str, Outcome] = {}
        self._publishing: dict[str, None] = {}
        self._in_hand: str | None = None

    def receive(self, frame: bytes) -> Receipt:
        """An `Acknowledge` is obeyed here. Raises `msgspec.DecodeError` for what is no command."""
        heading = _heading_decoder.decode(frame)
        if heading.command == "acknowledge":
            self._acknowledge(frame)
            return Receipt(is_to_run=False)
        if heading.command_id in self._publishing:
            return Receipt(is_to_run=False)
        if heading.command_id in self._outcomes:
            return Receipt(is_to_run=False, answer=self._outcomes[heading.command_id])
        self._in_hand = heading.command_id
        return Receipt(is_to_run=True)

    def note(self, said: Said) -> None:
        """To be called before it is sent."""
        if isinstance(said, Hello):
            return
        if isinstance(said, Progress):
            # Only of the command in hand: what a save that was given up on still tells begins nothing.
            if said.command_id == self._in_hand and said.phase != "capturing":
                self._publishing[said.command_id] = None
                self._in_hand = None
            return
        self._publishing.pop(said.command_id, None)
        self._outcomes[said.command_id] = said
        if said.command_id == self._in_hand:
            self._in_hand = None

    def told_in(self, hello: Hello) -> Hello:
        return msgspec.structs.replace(
            hello, outcomes=tuple(self._outcomes.values()), publishing=tuple(self._publishing)
        )

    def _acknowledge(self, frame: bytes) -> None:
        command = decode_command(frame)
        assert isinstance(command, Acknowledge)
        for command_id in command.command_ids:
            self._outcomes.pop(command_id, None)
