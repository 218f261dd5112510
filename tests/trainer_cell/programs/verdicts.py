"""Two ranks put `Ranks` and `BallotBox` to the test; each prints one line of JSON with what it saw."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch.distributed as dist

from trainer_cell.checkpoint.vote import BallotBox, Vote
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.ranks import Ranks, Verdict

WELL = Verdict(None, "")


def failure_of(step: Any) -> list[str]:
    try:
        step()
    except CommandFailed as failure:
        return [failure.kind.value, failure.message]
    return []


def only_on(rank: int, ranks: Ranks, error: Exception) -> Any:
    def step() -> int:
        if ranks.rank == rank:
            raise error
        return ranks.rank

    return step


def votes(ranks: Ranks, ballots: BallotBox) -> dict[str, Any]:
    """Attempt `a`: rank 1 says no. Attempt `b`: rank 1 says nothing, but has a vote on `c` in the box already."""
    no = Verdict(ErrorKind.STORAGE_FAILED, "EIO")
    with ballots.booth() as booth:
        if not ranks.is_first:
            booth.cast("a", Vote(no, None))
            booth.cast("c", Vote(WELL, None))
            ranks.gather(None)
            return {}
        ranks.gather(None)
        own = Vote(WELL, None)
        start = time.monotonic()
        seen = {name: [vote.verdict.kind for vote in booth.collect(name, own, 1.0)] for name in "abc"}
        return {"votes": seen, "seconds": time.monotonic() - start}


def places(ranks: Ranks, ballots: BallotBox) -> dict[str, Any]:
    """Rank 0 announces `a` while rank 1 waits for it, has nowhere to write `b`, and never speaks of `c`."""
    with ballots.booth() as booth:
        if ranks.is_first:
            booth.announce("b", None)
            ranks.gather(None)
            # On a connection of its own: one that waits could not be told anything.
            booth.announce("a", "token")
            return {}
        ranks.gather(None)
        return {"places": [booth.announced(name, 1.0) for name in "abc"]}


def main() -> None:
    dist.init_process_group("gloo")
    ranks = Ranks()
    ballots = BallotBox(ranks)
    seen = {
        "rank": ranks.rank,
        "broadcast": ranks.broadcast(b"frame" if ranks.is_first else None).decode(),
        "agreed": ranks.agree(lambda: ranks.rank * 10),
        "first": ranks.first(lambda: ranks.rank),
        "one": failure_of(lambda: ranks.agree(only_on(1, ranks, OSError(28, "x")))),
        "typed": failure_of(lambda: ranks.agree(only_on(0, ranks, CommandFailed(ErrorKind.BAD_COMMAND, "no")))),
        "first failed": failure_of(lambda: ranks.first(only_on(0, ranks, ValueError("bug")))),
        "still agreed": ranks.agree(lambda: "yes"),
        **votes(ranks, ballots),
        **places(ranks, ballots),
    }
    # One write for each line: the ranks share the pipe.
    sys.stdout.write(json.dumps(seen) + "\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
