"""What the journal does not take was never asked."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from gateway.scheduling.backlog import Backlog
from gateway.scheduling.errors import Unavailable
from gateway.store import writer
from gateway.store.errors import JournalUnavailable
from gateway.store.writer import Queued
from tests.gateway.scheduling.lives import Life, lives
from tests.gateway.scheduling.rig import create, forward_backward, succeeded, until
from tests.gateway.store.rows import a_command


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


@pytest.mark.parametrize(("seq_id", "key"), [(1, None), (None, "key")], ids=["a number", "a key"])
async def test_a_command_that_was_refused_leaves_nothing_and_its_number_is_free(
    tmp_path: Path, seq_id: int | None, key: str | None
) -> None:
    big, other = forward_backward(*range(500)), forward_backward(7)
    async with lives(tmp_path, backlog=Backlog(max_bytes=8000)) as machine:
        gateway = machine.gateway
        model = (await gateway.created()).model_id
        failing = Failing(gateway)
        failing.go_on.set()
        refused = gateway.scheduler.submit("alice", model, seq_id, big, key)
        with pytest.raises(Unavailable):
            await refused.accepted()
        assert gateway.scheduler.futures.find(refused.request_id) is None
        assert gateway.scheduler.model("alice", model).pending == 1
        # Another content under the same number or key, and as much as may wait beside nothing.
        again = await gateway.scheduler.submit("alice", model, seq_id, other, key).accepted()
        assert again.request_id != refused.request_id
        await gateway.scheduler.submit("alice", model, 2, big).accepted()


async def test_a_session_and_a_model_that_were_refused_are_nowhere(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        failing = Failing(gateway)
        failing.go_on.set()
        with pytest.raises(Unavailable):
            await gateway.opened()
        assert gateway.scheduler.sessions.list("alice") == []
        session = await gateway.opened()
        failing = Failing(gateway)
        failing.go_on.set()
        with pytest.raises(Unavailable):
            await gateway.scheduler.submit_create("alice", session, 0, create()).accepted()
        assert gateway.scheduler.sessions.get("alice", session).model_ids == []
        assert gateway.scheduler.models("alice") == []


async def test_a_model_of_plain_rest_is_in_a_session_that_lasts_whatever_the_journal_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that the session is in a transaction of its own, and that one fails.
    monkeypatch.setattr(writer, "_BATCH_WRITES", 1)
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        failing = Failing(gateway)
        made = gateway.scheduler.submit_create_plain("alice", create(), "key")
        failing.go_on.set()
        await made.accepted()
        gateway = await machine.next()
        with gateway.cell():
            await succeeded(gateway.scheduler.submit("alice", made.model_id, 1, forward_backward()))


async def test_a_command_without_its_model_is_out_of_the_journal_after_the_next_start(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        accepted: list[None] = []
        gateway.journal.accept(a_command(1), None, lambda: accepted.append(None), lambda why: None)
        await until(lambda: bool(accepted))
        gateway = await machine.next()
        await until(lambda: gateway.journal.load().commands == [])
