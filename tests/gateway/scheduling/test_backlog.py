"""A tenant can have only so much waiting, and is never locked out by its own early arrivals."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.scheduling.backlog import Backlog
from gateway.scheduling.errors import QueueFull
from tests.gateway.scheduling.rig import create, forward_backward, optim_step, rig, succeeded


async def test_too_much_waiting_is_refused_and_other_tenants_are_not(tmp_path: Path) -> None:
    async with rig(tmp_path, backlog=Backlog(max_commands=3)) as gateway:
        made = gateway.scheduler.submit_create("alice", gateway.session(), 0, create())
        gateway.submit(made.model_id, forward_backward(), optim_step())
        with pytest.raises(QueueFull):
            gateway.scheduler.submit("alice", made.model_id, 3, forward_backward())
        with pytest.raises(QueueFull):
            gateway.scheduler.submit_create("alice", gateway.session(), 0, create())
        gateway.scheduler.submit_create("bob", gateway.session("bob"), 0, create())
        # A retry of what was accepted is no new command.
        gateway.scheduler.submit("alice", made.model_id, 2, optim_step())


async def test_bytes_of_payload_count_until_they_are_dropped(tmp_path: Path) -> None:
    big = forward_backward(*range(500))
    async with rig(tmp_path, backlog=Backlog(max_bytes=8000)) as gateway:
        made = gateway.scheduler.submit_create("alice", gateway.session(), 0, create())
        first = gateway.scheduler.submit("alice", made.model_id, 1, big)
        assert first.payload_bytes == 500 * 16
        with pytest.raises(QueueFull):
            gateway.scheduler.submit("alice", made.model_id, 2, big)
        with gateway.cell():
            await succeeded(first)
            await succeeded(gateway.scheduler.submit("alice", made.model_id, 2, big))


async def test_the_number_that_holds_up_all_others_is_always_let_in(tmp_path: Path) -> None:
    async with rig(tmp_path, backlog=Backlog(max_commands=3)) as gateway:
        with gateway.cell():
            model = await gateway.model()
            early = [gateway.scheduler.submit("alice", model, seq, forward_backward()) for seq in (2, 3, 4)]
            with pytest.raises(QueueFull):
                gateway.scheduler.submit("alice", model, 5, forward_backward())
            gateway.scheduler.submit("alice", model, 1, forward_backward())
            await succeeded(early[-1])
