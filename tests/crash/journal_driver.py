"""The process that works on journals in children; see `tests.crash.children`.

A job is `{"root": …, "opens": …, "seeds": …}`: whether opening the journal is part of what is looked at, and whether
the work begins with the seed. It says the steps that were `durable` and those that were `refused` and not done since,
how many `refusals` there were, and `done` at the end. `careless`: the journal is opened so that it does not sync.
`dies_refused`: the child kills itself once a step was refused.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gateway.store import database
from gateway.store.journal import Journal, JournalUnavailable, JournalUnusable
from tests.crash import children
from tests.crash.children import Say
from tests.crash.journal_work import Working, contents, seed, work
from tests.gateway.store.rows import url_of


class Ends:
    """How the steps ended: a step is in one of the two."""

    def __init__(self, say: Say, dies_refused: bool) -> None:
        self._say, self._dies_refused = say, dies_refused
        self._durable: list[str] = []
        self._refused: list[str] = []
        self._refusals = 0

    def add(self, step: str, how: str) -> None:
        if how == "refused":
            self._refusals += 1
            self._refused.append(step)
        else:
            self._durable.append(step)
            self._refused = [refused for refused in self._refused if refused != step]
        self._say({"durable": self._durable, "refused": self._refused, "refusals": self._refusals})
        if how == "refused" and self._dies_refused:
            os.kill(os.getpid(), signal.SIGKILL)


def prepare(job: dict[str, Any], say: Say) -> Callable[[], None]:
    if job.get("careless"):
        database._PRAGMAS = tuple(pragma.replace("FULL", "OFF") for pragma in database._PRAGMAS)
    ends = Ends(say, job.get("dies_refused", False))
    root = Path(job["root"])
    journal = None if job["opens"] else Journal.open(url_of(root))

    async def go() -> None:
        opened = journal or Journal.open(url_of(root))
        opened.load()
        working = Working(opened, ends.add)
        if job["seeds"]:
            await seed(working)
        await work(working)
        await opened.close()

    def act() -> None:
        try:
            asyncio.run(go())
        except (JournalUnusable, JournalUnavailable) as failure:
            say({"failed": type(failure).__name__, "text": str(failure)})
        else:
            say({"done": True})

    return act


def main(warm: Path) -> None:
    """warm: a new directory, to try everything out on before anybody looks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warm.mkdir()
    prepare({"root": str(warm), "opens": True, "seeds": True}, lambda _: None)()
    contents(warm)
    children.serve(prepare)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
