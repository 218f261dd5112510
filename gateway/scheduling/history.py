"""What has changed a model's state since its last snapshot: enough to bring it back, bit for bit, into any slot."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gateway.scheduling.requests import Request
from trainer_cell.vault.locks import Lock

# After a snapshot that failed, of a full disk for example.
RETRY_S = 30.0

What = Literal["create", "load", "forward_backward", "optim_step", "discard"]


@dataclass(frozen=True)
class Change:
    """One command that changed the model, in as few words as it takes to do it again.

    turn: its place among all that the model did. request_id: where the arrays of a forward_backward are found.
    request: what was asked, without arrays; None of a discard. payload_bytes: of those arrays, in the journal.
    version / with_optimizer: what a load read, and whether the optimizer came with it; lease: keeps the version there.
    iteration: the model's, after an optim_step.
    """

    turn: int
    what: What
    request_id: str = ""
    request: Request | None = None
    payload_bytes: int = 0
    version: str = ""
    with_optimizer: bool = False
    lease: Lock | None = None
    iteration: int | None = None


@dataclass(frozen=True)
class Snapshot:
    """version: relative to the checkpoint root; it holds the effect of every command up to `turn`.

    lease: keeps the version there, whatever takes its name.
    """

    version: str
    turn: int
    lease: Lock | None = None


class History:
    """snapshot: the last durable one, None before the first. changes: after it, in order of turn.

    dirty_since_s: monotonic time of the first change of the weights that it lacks; None when it lacks none.
    next_try_s: monotonic time before which no snapshot is tried.
    is_broken: what was done since the snapshot is not known in full, so that the model cannot be brought back.
    """

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        self.snapshot = snapshot
        self.changes: list[Change] = []
        self.dirty_since_s: float | None = None
        self.is_broken = False
        self.next_try_s = 0.0

    @property
    def last_turn(self) -> int:
        """Of the last command that changed anything: what a slot that holds the model says of itself; -1 for none."""
        if self.changes:
            return self.changes[-1].turn
        return self.snapshot.turn if self.snapshot is not None else -1

    @property
    def last_of_weights(self) -> Change | None:
        """The last one that changed more than the gradient; None when the last snapshot holds all of those."""
        weights = (change for change in reversed(self.changes) if change.what in ("create", "load", "optim_step"))
        return next(weights, None)

    @property
    def weights_turn(self) -> int:
        """Of the last command that changed more than the gradient: what a snapshot taken now would hold."""
        if (change := self.last_of_weights) is not None:
            return change.turn
        return self.snapshot.turn if self.snapshot is not None else -1

    @property
    def is_dirty(self) -> bool:
        """Whether a snapshot taken now would hold more than the last one."""
        return self.weights_turn > (self.snapshot.turn if self.snapshot is not None else -1)

    @property
    def has_gradient(self) -> bool:
        """Whether some is accumulated, which no snapshot holds."""
        return bool(self.changes) and self.changes[-1].what == "forward_backward"

    @property
    def payload_bytes(self) -> int:
        return sum(change.payload_bytes for change in self.changes)

    def note(self, change: Change) -> None:
        if self.snapshot is not None and change.turn <= self.snapshot.turn:
            return
        self.changes.append(change)
        if self.dirty_since_s is None and change.what != "forward_backward":
            self.dirty_since_s = time.monotonic()

    def discard_gradient(self, turn: int) -> None:
        """The gradient that was accumulated is gone, and so is the need to accumulate it again."""
        while self.changes and self.changes[-1].what in ("forward_backward", "discard"):
            self.changes.pop()
        self.changes.append(Change(turn, "discard"))

    def cover(self, snapshot: Snapshot) -> None:
        """It is durable: what it holds need not be done again."""
        self._release(change.lease for change in self.changes if change.turn <= snapshot.turn)
        self.changes = [change for change in self.changes if change.turn > snapshot.turn]
        self._release([self.snapshot.lease] if self.snapshot is not None else [])
        self.snapshot = snapshot
        self.dirty_since_s = time.monotonic() if self.is_dirty else None

    def note_no_snapshot(self) -> None:
        """One failed: another is not tried at once."""
        self.next_try_s = time.monotonic() + RETRY_S

    def start_anew(self) -> None:
        """What comes next gives the model a state that needs nothing of what was before."""
        self.end()
        self.is_broken = False

    def end(self) -> None:
        """The model is over."""
        self._release(change.lease for change in self.changes)
        self._release([self.snapshot.lease] if self.snapshot is not None else [])
        self.changes, self.snapshot = [], None

    def _release(self, leases: Iterable[Lock | None]) -> None:
        for lease in leases:
            if lease is not None:
                lease.release()
