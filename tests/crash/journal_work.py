"""Work that a journal is given while it is killed or its disk fails, and what may be in it afterwards.

The work begins on a journal that holds `seed`; every step waits for its answer, so that each is a transaction.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gateway.store.journal import Journal, JournalUnavailable
from gateway.store.records import CommandRecord, ModelRecord, Stored
from tests.crash.workload import demand
from tests.gateway.store.rows import Writing, a_command, a_model, a_session, url_of

# Of the first model; what came with the commands of those turns.
FACTS = {-1: b"facts", 0: b"facts", 1: b"facts of 1", 2: b"facts of 2"}
COMMANDS = {number: a_command(number, payload=bytes([number]) * 9000) for number in range(5)}
SECOND = a_command(7, "model-2")
OUTCOMES = {turn: b"outcome %d" % turn * 100 for turn in range(3)}
SEED_STEPS = ("session", "accept 0", "accept 1", "complete 0")
STEPS = ("accept 2", "accept second", "complete 1", "snapshot 1", "accept 3", "complete 2", "accept 4")
# May be refused, and then are not there.
REFUSABLE = tuple(step for step in (*SEED_STEPS, *STEPS) if step.startswith(("accept", "session")))

# SQLite itself waits for ten seconds where a lock cannot be let go of.
_PATIENCE_S = 30.0


class Working(Writing):
    """Takes steps, and tells `on_end` of each as soon as a client would hear of it: "durable", or "refused", after
    which it is tried again for a while."""

    def __init__(self, journal: Journal, on_end: Callable[[str, str], None]) -> None:
        super().__init__(journal)
        self._on_end = on_end

    async def keep(self, step: str, answer: asyncio.Future[None]) -> None:
        await answer
        self._on_end(step, "durable")

    async def ask(self, step: str, attempt: Callable[[], asyncio.Future[None]]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                await self.keep(step, attempt())
            except JournalUnavailable as failure:
                self._on_end(step, "refused")
                demand(time.monotonic() < deadline, f"{step} is refused for ever: {failure}")
                # It is not told when it is available again.
                await asyncio.sleep(0.01)
            else:
                return

    async def complete_turn(self, turn: int) -> None:
        # The attempt is not waited for: it is in the same transaction or in one before.
        self.journal.note_attempt(COMMANDS[turn].request_id, 1, lambda: None)
        model = a_model(facts=FACTS[turn])
        await self.keep(f"complete {turn}", self.complete(COMMANDS[turn], turn, model, OUTCOMES[turn]))


async def seed(journal: Working) -> None:
    await journal.ask("session", lambda: journal.open_session(a_session()))
    await journal.ask("accept 0", lambda: journal.accept(COMMANDS[0], a_model()))
    await journal.ask("accept 1", lambda: journal.accept(COMMANDS[1]))
    await journal.complete_turn(0)


async def work(journal: Working) -> None:
    await journal.ask("accept 2", lambda: journal.accept(COMMANDS[2]))
    await journal.ask("accept second", lambda: journal.accept(SECOND, a_model("model-2", 1)))
    await journal.complete_turn(1)
    journal.journal.note_told(COMMANDS[1].request_id, 100, 4000.0)
    await journal.keep("snapshot 1", journal.snapshot(1))
    await asyncio.gather(
        journal.ask("accept 3", lambda: journal.accept(COMMANDS[3])),
        journal.complete_turn(2),
        journal.ask("accept 4", lambda: journal.accept(COMMANDS[4])),
    )


def contents(root: Path) -> tuple[Stored, dict[str, bytes]]:
    """As a gateway that starts finds it; it also takes a command, and ends as it should."""

    async def read() -> tuple[Stored, dict[str, bytes]]:
        journal = Journal.open(url_of(root))
        found = journal.load()
        payloads = await journal.payloads([command.request_id for command in found.commands])
        new = f"model-after-{found.next_moment}"
        await Writing(journal).accept(a_command(found.next_moment, new), a_model(new, found.next_moment))
        await journal.close()
        return found, payloads

    return asyncio.run(read())


def check(root: Path, said: Mapping[str, Any], before: tuple[str, ...]) -> None:
    """said: the steps that were `durable` and those `refused`; before: those that were done before all that."""
    durable, refused = {*before, *said.get("durable", ())}, set(said.get("refused", ()))
    demand(refused <= set(REFUSABLE), f"{refused} may not be refused")
    found, payloads = contents(root)
    commands = {command.request_id: command for command in found.commands}
    models = {model.model_id: model for model in found.models}
    for step, command in _accepted().items():
        _check_accepted(step, command, commands, durable, refused)
    demand((SECOND.request_id in commands) == ("model-2" in models), "half of a model's first command")
    demand((COMMANDS[0].request_id in commands) == ("model-1" in models), "half of a model's first command")
    demand("session" not in durable or found.sessions == [a_session()], f"sessions: {found.sessions}")
    demand("session" not in refused or found.sessions == [], "a refused session is there")
    if "model-1" in models:
        _check_outcomes(models["model-1"], commands, payloads, durable)


def _accepted() -> dict[str, CommandRecord]:
    return {"accept second": SECOND} | {f"accept {number}": command for number, command in COMMANDS.items()}


def _check_accepted(
    step: str, command: CommandRecord, commands: Mapping[str, CommandRecord], durable: set[str], refused: set[str]
) -> None:
    row = commands.get(command.request_id)
    demand(row is not None or step not in durable, f"{step} was acknowledged and is not there")
    demand(row is None or step not in refused, f"{step} was refused and is there")
    if row is not None:
        immutable = ("model_id", "moment", "seq_id", "fingerprint", "request", "payload_bytes", "accepted")
        for name in immutable:
            demand(getattr(row, name) == getattr(command, name), f"{step}: {name} is not what was accepted")
        if row.finished is None:
            demand(row.payload == command.payload, f"{step}: its payload is not what was accepted")


def _check_outcomes(
    model: ModelRecord, commands: Mapping[str, CommandRecord], payloads: Mapping[str, bytes], durable: set[str]
) -> None:
    reached = -1
    for turn in range(3):
        row = commands.get(COMMANDS[turn].request_id)
        if row is None or row.finished is None:
            demand(row is None or row.outcome is None, f"half an outcome of {turn}")
            demand(f"complete {turn}" not in durable, f"the outcome of {turn} was acknowledged and is not there")
            continue
        demand(reached == turn - 1, f"the outcome of {turn} came before an earlier one's")
        demand((row.outcome, row.turn, row.attempts) == (OUTCOMES[turn], turn, 1), f"half an outcome of {turn}: {row}")
        reached = turn
    demand(model.facts == FACTS[reached], f"the model's facts are {model.facts!r} after {reached}")
    has_snapshot = model.snapshot is not None
    demand(has_snapshot or "snapshot 1" not in durable, "the snapshot was acknowledged and is not there")
    demand(not has_snapshot or reached >= 1, "the snapshot came before an earlier outcome")
    for turn in range(min(reached, 1) + 1):
        is_dropped = COMMANDS[turn].request_id not in payloads
        demand(is_dropped == has_snapshot, f"the payload of {turn} and the snapshot do not agree")
    if has_snapshot:
        row = commands[COMMANDS[1].request_id]
        demand(row.told_moment == 100, "a telling was overtaken by a later write")
