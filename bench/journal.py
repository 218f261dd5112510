"""What accepting a command costs: the journal against writing the same bytes to a file and syncing it.

python -m bench.journal [DIRECTORY]
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from gateway.store.journal import Journal
from gateway.store.records import CommandRecord

_SECONDS = 3.0
_SIZES = {"1 KB": 1 << 10, "5 MB": 5 << 20}


def raw(directory: Path, size: int) -> float:
    """Appends and syncs a second."""
    content, done = os.urandom(size), 0
    with open(directory / "raw", "wb", buffering=0) as file:
        start = time.perf_counter()
        while time.perf_counter() - start < _SECONDS:
            file.write(content)
            os.fdatasync(file.fileno())
            done += 1
        elapsed = time.perf_counter() - start
    (directory / "raw").unlink()
    return done / elapsed


def a_command(number: int, payload: bytes) -> CommandRecord:
    return CommandRecord(
        request_id=f"future-{number:032x}",
        model_id="model",
        tenant="tenant",
        moment=number,
        seq_id=number,
        fingerprint=bytes(32),
        operation="forward_backward",
        request=bytes(200),
        payload=payload,
        payload_bytes=len(payload),
        accepted=0.0,
    )


async def accepts(directory: Path, size: int, clients: int) -> tuple[float, float]:
    """Accepts a second, and the longest that the event loop stood still for."""
    journal = await asyncio.to_thread(Journal.open, f"sqlite:///{directory / 'journal.sqlite3'}")
    payload, numbers, loop = os.urandom(size), iter(range(1 << 62)), asyncio.get_running_loop()
    start, done, longest = time.perf_counter(), 0, 0.0

    async def client() -> None:
        nonlocal done
        while time.perf_counter() - start < _SECONDS:
            durable: asyncio.Future[None] = loop.create_future()
            command = a_command(next(numbers), payload)
            journal.accept(command, None, partial(durable.set_result, None), durable.set_exception)
            await durable
            done += 1

    async def watch() -> None:
        nonlocal longest
        while time.perf_counter() - start < _SECONDS:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            longest = max(longest, time.perf_counter() - before - 0.001)

    await asyncio.gather(watch(), *(client() for _ in range(clients)))
    elapsed = time.perf_counter() - start
    await journal.close()
    return done / elapsed, longest


async def main(directory: Path) -> None:
    print(f"{'payload':>8} {'clients':>8} {'accepts/s':>10} {'MB/s':>8} {'raw/s':>8} {'ratio':>6} {'loop still':>13}")
    for name, size in _SIZES.items():
        for clients in (1, 64):
            plain = await asyncio.to_thread(raw, directory, size)
            with tempfile.TemporaryDirectory(dir=directory) as journals:
                rate, longest = await accepts(Path(journals), size, clients)
            print(
                f"{name:>8} {clients:>8} {rate:>10.1f} {rate * size / 1e6:>8.1f} {plain:>8.1f} {rate / plain:>6.2f} "
                f"{longest * 1e3:>10.1f} ms"
            )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as name:
        asyncio.run(main(Path(name)))
