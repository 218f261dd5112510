"""A process that does jobs in children, so that those can be traced, killed, limited and starved.

Everything is imported before the first fork, and a child waits for the word to go before it begins: so the calls to
the system that come after are those of the job, and nothing else's.

On standard input it takes one line for each child, a job as JSON, answers with the child's process id, lets it go at an
empty line, and answers with what the child said and how it ended, each on a line of JSON. A child waits with `readv`
and speaks with `writev`, which no job uses.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_AT_THE_GATE = b"."

# A child says a dict, as often as it likes; what it says later is added to what it said, and counts where they differ.
Say = Callable[[dict[str, Any]], None]
# Gets ready, and returns what is done once the child is let go.
Prepare = Callable[[dict[str, Any], Say], Callable[[], None]]


def serve(prepare: Prepare) -> None:
    for line in sys.stdin:
        _run(json.loads(line), prepare)


def _in_child(job: dict[str, Any], prepare: Prepare, gate: int, out: int) -> None:
    """From the first byte that it says, the child makes no call but its job's."""
    act = prepare(job, lambda said: _speak(out, said))
    os.writev(out, [_AT_THE_GATE])
    os.readv(gate, [bytearray(1)])
    act()
    os._exit(0)


def _speak(out: int, said: dict[str, Any]) -> None:
    os.writev(out, [json.dumps(said).encode() + b"\n"])


def _run(job: dict[str, Any], prepare: Prepare) -> None:
    gate, open_gate = os.pipe()
    back, out = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(open_gate)
        os.close(back)
        _in_child(job, prepare, gate, out)
    os.close(gate)
    os.close(out)
    assert os.read(back, 1) == _AT_THE_GATE
    _tell(str(child))
    sys.stdin.readline()
    with suppress(BrokenPipeError):  # killed already
        os.write(open_gate, b"!")
    os.close(open_gate)
    with open(back, "rb") as heard:
        said = heard.read()
    _, status = os.waitpid(child, 0)
    answer: dict[str, Any] = {}
    for line in said.splitlines():
        answer.update(json.loads(line))
    if os.WIFSIGNALED(status):
        answer["signal"] = os.WTERMSIG(status)
    elif status != 0:
        answer["untyped"] = "its traceback is on standard error"
    _tell(json.dumps(answer))


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
