"""What the journal does not take was never asked."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from gateway.scheduling.errors import Unavailable
from gateway.store.errors import JournalUnavailable
from gateway.store.writer import Queued
from tests.gateway.scheduling.lives import Life, lives
from tests.gateway.scheduling.rig import create, forward_backward, succeeded, until


class Failing:
    """The next transaction fails, once `go_on` is set. entered: it has been begun."""

    def __init__(self, gateway: Life) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        transact = gateway.transact

        def failing(batch: Sequence[Queued]) -> JournalUnavailable | None:
            if self.entered.is_set() or not batch:
                return transact(batch)
            self.entered.set()
            self.go_on.wait()
            return JournalUnavailable("no room for so much")

        gateway.transact = failing


async def test_a_command_of_a_model_whose_create_was_refused_is_refused_too(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        session = await gateway.opened()
        failing = Failing(gateway)
        made = gateway.scheduler.submit_create("alice", session, 0, create())
        await until(failing.entered.is_set)
        trained = gateway.scheduler.submit("alice", made.model_id, 1, forward_backward(1))
        failing.go_on.set()
        for future in (made, trained):
            with pytest.raises(Unavailable):
                await future.accepted()
        again = gateway.scheduler.submit_create("alice", session, 0, create(seed=8))
        other = gateway.scheduler.submit("alice", again.model_id, 1, forward_backward(2, 3))
        await other.accepted()
        for _ in range(2):
            with gateway.cell() as cell:
                await succeeded(gateway.again(other))
                await succeeded(gateway.scheduler.submit("alice", again.model_id, None, forward_backward(only=True)))
                assert cell.slots.models[again.model_id].pending == 2
            gateway = await machine.next()
