"""What happens while something waits for the journal does not go by it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from gateway.store.errors import JournalUnavailable
from gateway.store.writer import Queued
from tests.gateway.scheduling.lives import lives
from tests.gateway.scheduling.rig import forward_backward, reached, succeeded, until
from tests.gateway.scheduling.test_cell_epoch import kill, until_lost
from trainer_cell.protocol.commands import ForwardBackward


async def test_a_command_that_waited_for_the_journal_goes_to_no_cell_that_came_meanwhile(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as first:
            model = await gateway.made()
            hold = first.hold_next(ForwardBackward)
            trained = gateway.scheduler.submit("alice", model, 1, forward_backward())
            await reached(hold)
            await kill(first)
            await until_lost(gateway)
        entered, go_on, transact = threading.Event(), threading.Event(), gateway.transact

        def slowly(batch: Sequence[Queued]) -> JournalUnavailable | None:
            entered.set()
            go_on.wait()
            return transact(batch)

        gateway.transact = slowly
        with gateway.cell() as second:
            # Its second attempt is put on record before it is sent.
            await until(entered.is_set)
            await kill(second)
            await until_lost(gateway)
        with gateway.cell() as third:
            await until(gateway.link.ready.is_set)
            go_on.set()
            await succeeded(trained)
            assert third.slots.models[model].pending == 3
            # It was never sent to the second.
            assert trained.attempts == 2
