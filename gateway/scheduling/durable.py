"""Waiting in the event loop for what the journal calls back about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.scheduling.errors import Unavailable
from gateway.store.journal import JournalUnavailable

Write = Callable[[Callable[[], None]], None]
RefusableWrite = Callable[[Callable[[], None], Callable[[JournalUnavailable], None]], None]


async def durable(write: Write) -> None:
    """Once what `write` asks of the journal is durable; it is given what to call then."""
    done = asyncio.get_running_loop().create_future()

    def on_durable() -> None:
        if not done.done():
            done.set_result(None)

    write(on_durable)
    await done


async def durable_or_refused(write: RefusableWrite) -> None:
    """As `durable`; raises `Unavailable` when the journal did not take it."""
    done = asyncio.get_running_loop().create_future()

    def on_durable() -> None:
        if not done.done():
            done.set_result(None)

    def on_failed(why: JournalUnavailable) -> None:
        if not done.done():
            done.set_exception(Unavailable(str(why)))

    write(on_durable, on_failed)
    await done
