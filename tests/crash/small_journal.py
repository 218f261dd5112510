"""Run in a mount namespace of its own: a journal on a tmpfs that fills up, and gets room again.

    python -m tests.crash.small_journal DIRECTORY

Says `refused` or `accepted` for each command it tries with a little more room each time. Ends with an error as soon as
anything is wrong.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from gateway.store.journal import Journal, JournalUnavailable
from tests.crash.workload import demand
from tests.gateway.store.rows import Writing, a_command, a_model, url_of

_DISK_BYTES = 8 << 20
_PAGE = 8192
_PATIENCE_S = 30.0


def fill(ballast: Path, left: int) -> None:
    ballast.unlink(missing_ok=True)
    free = os.statvfs(ballast.parent).f_bavail * os.statvfs(ballast.parent).f_frsize
    with ballast.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, max(free - left, 1))


async def one(journal: Writing, number: int) -> bool:
    """Whether a command was accepted; an outcome that comes with it is kept either way."""
    try:
        await journal.accept(a_command(number, payload=os.urandom(10 * _PAGE)))
    except JournalUnavailable:
        return False
    return True


async def main(directory: Path) -> None:
    journal = Writing(await asyncio.to_thread(Journal.open, url_of(directory)))
    await journal.accept(a_command(0), a_model())
    accepted = [0]
    outcomes: list[asyncio.Future[None]] = []
    for number in range(1, 40):
        fill(directory / "ballast", left=number // 2 * _PAGE)
        outcomes.append(journal.attempt(a_command(0), number))
        is_accepted = await one(journal, number)
        accepted += [number] * is_accepted
        sys.stdout.write("accepted\n" if is_accepted else "refused\n")
        found = await asyncio.to_thread(journal.journal.load)
        demand([row.seq_id for row in found.commands] == accepted, f"holds {found.commands}, not {accepted}")
    (directory / "ballast").unlink()
    await asyncio.wait_for(asyncio.gather(*outcomes), _PATIENCE_S)
    attempts = [name for name, _ in journal.answers if name.startswith("attempt")]
    demand(attempts == [f"attempt {number}" for number in range(1, 40)], f"written as {attempts}")
    demand(journal.journal.is_available and await one(journal, 99), "there is room, and nothing is accepted")
    await journal.journal.close()


if __name__ == "__main__":
    mounted = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "none", str(mounted)], check=True)
    asyncio.run(main(mounted))
