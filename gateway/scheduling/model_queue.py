"""One model's commands: in order, once each."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from gateway.scheduling.errors import InvalidRequest, SequenceConflict
from gateway.scheduling.futures import Future
from gateway.scheduling.gradient_window import GradientWindow
from gateway.scheduling.history import History
from gateway.scheduling.models import Model

# Numbers and keys are remembered beyond their commands' end, so that late retries are known; the newest so many, and of
# a model that nobody uses none in the end.
REMEMBERED = 4096
LARGEST_SEQ_ID = 2**31 - 1
# Numbers that never come are sealed one by one, so there must be an end to how many one request can leave out.
MOST_AHEAD = REMEMBERED


@dataclass(frozen=True)
class Accepted:
    """What is kept of a command to know its retries by, after the command itself is gone."""

    request_id: str
    fingerprint: bytes


class ModelQueue:
    """A model with its commands. `ready` holds those whose turn it can be, in order; the first runs first.

    turn: the last that was given to a command. unsettled: a save that has its turn and no answer yet; must_save_again:
    it is known not to have come to be, and is made again at its place when the model is brought back.
    losses: how often in a row a cell was lost while it brought the model back.
    num_unwritten: answers that are on their way into the journal.

    Numbered commands become ready once all numbers below are accepted. A command without a number becomes ready at
    once, behind the highest contiguous number accepted so far. The model's create is number 0 and always first.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.window = GradientWindow()
        self.history = History()
        self.turn = -1
        self.unsettled: Future | None = None
        self.must_save_again = False
        self.losses = 0
        self.num_unwritten = 0
        self.ready: deque[Future] = deque()
        self.running: Future | None = None
        self.contiguous = -1
        self._early: dict[int, Future] = {}
        self._numbers: OrderedDict[int, Accepted] = OrderedDict()

    @property
    def is_idle(self) -> bool:
        return self.model.pending == 0

    def could_run_now(self, seq_id: int | None) -> bool:
        """Whether a command of this number would wait for no other of the model."""
        return not self.ready and self.running is None and (seq_id is None or seq_id == self.contiguous + 1)

    def known(self, seq_id: int, fingerprint: bytes) -> str | None:
        """The request id given to this very command before, None for a new one.

        Raises `SequenceConflict` when the number came before with another content, or so long ago that its content
        is forgotten; `InvalidRequest` for a number that cannot be, or is far ahead of all that came.
        """
        if not 0 <= seq_id <= LARGEST_SEQ_ID:
            raise InvalidRequest(f"seq_id {seq_id} is not between 0 and {LARGEST_SEQ_ID}")
        accepted = self._numbers.get(seq_id)
        if accepted is None:
            if seq_id <= self.contiguous:
                raise SequenceConflict(f"seq_id {seq_id} of model {self.model.model_id} was spent long ago")
            if seq_id > self.contiguous + MOST_AHEAD:
                raise InvalidRequest(
                    f"seq_id {seq_id} of model {self.model.model_id} is more than {MOST_AHEAD} ahead of the others"
                )
            return None
        if accepted.fingerprint != fingerprint:
            raise SequenceConflict(f"seq_id {seq_id} of model {self.model.model_id} came before with another content")
        return accepted.request_id

    def reserve(self, future: Future, seq_id: int | None, fingerprint: bytes) -> None:
        """A new command is on its way into the journal; `known` has been asked before, and knows it from now on."""
        self.model.pending += 1
        if seq_id is not None:
            self._numbers[seq_id] = Accepted(future.request_id, fingerprint)

    def withdraw(self, seq_id: int | None) -> None:
        """It could not be journalled: its number is free again."""
        self.model.pending -= 1
        if seq_id is not None:
            del self._numbers[seq_id]

    def place(self, future: Future, seq_id: int | None) -> None:
        """Put a command that is in the journal in its place."""
        if seq_id is None:
            self.ready.append(future)
            return
        self._early[seq_id] = future
        while (following := self._early.pop(self.contiguous + 1, None)) is not None:
            self.contiguous += 1
            self.ready.append(following)
        if self.model.is_over:
            self.release_early()
        self._forget_old()

    def remember(self, request_id: str, seq_id: int, fingerprint: bytes) -> None:
        """A number that was spent before this process; in order, and before any is placed."""
        self._numbers[seq_id] = Accepted(request_id, fingerprint)

    def is_expected(self, future: Future) -> bool:
        """Whether its outcome can be the next one of this model."""
        return future is self.unsettled or (bool(self.ready) and future is self.ready[0])

    def take(self, future: Future) -> None:
        """Out of those that wait, where an outcome came for it unasked."""
        if future in self.ready:
            self.ready.remove(future)

    def revive(self) -> None:
        """What one cell could not bring back another may."""
        if self.model.state == "lost":
            self.model.state, self.model.trouble, self.losses = "ready", None, 0

    @property
    def missing(self) -> range:
        """The numbers that the next early arrival waits for."""
        return range(self.contiguous + 1, min(self._early)) if self._early else range(0)

    def is_spent(self, seq_id: int) -> bool:
        """Whether it has come, also when it is still on its way into the journal."""
        return seq_id in self._numbers

    def request_id_of(self, seq_id: int) -> str | None:
        """None for a number that has not come, or was forgotten."""
        accepted = self._numbers.get(seq_id)
        return accepted.request_id if accepted is not None else None

    def next_turn(self) -> int:
        self.turn += 1
        return self.turn

    def release_early(self) -> None:
        """Let those that wait for a missing number go on: of a model that is over the number will never come."""
        for seq_id in sorted(self._early):
            self.ready.append(self._early.pop(seq_id))

    def forget_numbers(self) -> None:
        """That a number was spent remains known, with what content does not: nobody will send it again."""
        self._numbers = OrderedDict((key, one) for key, one in self._numbers.items() if key > self.contiguous)

    def _forget_old(self) -> None:
        while len(self._numbers) > REMEMBERED + self.model.pending:
            if next(iter(self._numbers)) > self.contiguous:
                return
            self._numbers.popitem(last=False)


class KeyBook:
    """Commands by the idempotency key their tenant gave them."""

    def __init__(self) -> None:
        self._tenants: dict[str, OrderedDict[str, Accepted]] = {}

    def known(self, tenant: str, key: str, fingerprint: bytes) -> str | None:
        """The request id given to this very command before, None for a new key; raises `SequenceConflict`."""
        accepted = self._tenants.get(tenant, OrderedDict()).get(key)
        if accepted is None:
            return None
        if accepted.fingerprint != fingerprint:
            raise SequenceConflict(f"idempotency key {key!r} came before with another request")
        return accepted.request_id

    def accept(self, tenant: str, key: str, request_id: str, fingerprint: bytes) -> None:
        keys = self._tenants.setdefault(tenant, OrderedDict())
        keys[key] = Accepted(request_id, fingerprint)
        while len(keys) > REMEMBERED:
            keys.popitem(last=False)

    def withdraw(self, tenant: str, key: str) -> None:
        """Its command could not be journalled."""
        self._tenants[tenant].pop(key, None)
