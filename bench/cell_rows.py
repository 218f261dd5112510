"""What a whole cell makes of a save and a load: from the command on the socket to its answer."""

from __future__ import annotations

import errno
import functools
import shutil
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from bench.cell import BenchCell, cell, load_command, new_id, nothing, save_command
from bench.ground import Ground, empty, forget, raw_read, raw_write
from bench.ratios import Pairs, Row, in_turns, timed
from trainer_cell.protocol.commands import Array, Datum, ForwardBackward
from trainer_cell.protocol.outcomes import ForwardBackwardDone, GradientsDiscarded, StateLoaded, StateSaved
from trainer_cell.vault.disk import Disk
from trainer_cell.vault.shard_layout import image_memory

_MODEL, _OTHER = "bench:train:0", "bench:train:1"
_STEP_PAIRS = 20
_OTHER_RANK = 8
# A batch of the other tenant: sequences of so many tokens.
_SEQUENCES, _TOKENS = 8, 256
_FAILURES = 10


def cell_rows(ground: Ground, base_model: str, ranks: int, sizes: list[int], pairs: dict[int, int]) -> Iterator[Row]:
    with cell(ground.directory, base_model, ranks) as running:
        for megabytes in sizes:
            yield from _SizeRows(running, ground, ranks, megabytes, pairs[megabytes]).rows()
    empty(ground.directory)
    if ranks > 1:
        yield _failure_row(ground, base_model, ranks)
        empty(ground.directory)


class _SizeRows:
    """Of one model whose whole training state has `megabytes`."""

    def __init__(self, running: BenchCell, ground: Ground, ranks: int, megabytes: int, pairs: int) -> None:
        self._cell, self._ground, self._ranks, self._pairs = running, ground, ranks, pairs
        self._megabytes, self._case = megabytes, f"{megabytes} MB"
        self._model = f"{_MODEL}-{megabytes}"
        self._spec = running.create(self._model, running.rank_of(megabytes * 1_000_000))
        self._saved = running.do(save_command(self._model), StateSaved)
        size = self._saved.size_bytes
        self._source, self._target = image_memory(size)[:size], image_memory(size)[:size]
        self._source[:] = self._target[:] = b"\x3f" * size

    def rows(self) -> Iterator[Row]:
        small = self._megabytes < 50
        stall = in_turns(self._pairs, self._stall, self._memcpy)
        reach = "≤ 2 ms + vote" if small else "≤ 1.1"
        yield Row("stall by a save / memcpy of a rank's bytes", self._case, stall, reach)
        saving = in_turns(self._pairs, self._save, lambda: raw_write(self._ground.directory, self._source))
        yield Row("durable save / raw write", self._case, saving, "≤ 1.6" if small else "≤ 1.0")
        loading = in_turns(self._pairs, self._load, self._raw_read)
        yield Row("load with optimizer / raw cold read", self._case, loading, "≤ 1.1")
        if self._megabytes == 50:
            yield self._other_row()

    def _save(self) -> float:
        command = save_command(self._model)
        begin = time.perf_counter()
        saved = self._cell.do(command, StateSaved)
        seconds = time.perf_counter() - begin
        self._keep(saved)
        return seconds

    def _stall(self) -> float:
        """How much later a command that does nothing is answered when a save was sent just before it."""
        undisturbed = min(timed(lambda: self._cell.do(nothing(self._model), GradientsDiscarded)) for _ in range(3))
        save, next_one = save_command(self._model), nothing(self._model)
        begin = time.perf_counter()
        self._cell.send(save)
        self._cell.send(next_one)
        self._cell.wait(next_one)
        seconds = time.perf_counter() - begin
        saved = self._cell.wait(save)
        assert isinstance(saved, StateSaved), saved
        self._keep(saved)
        return max(seconds - undisturbed, 1e-9)

    def _memcpy(self) -> float:
        share = len(self._source) // self._ranks

        def act() -> None:
            self._target[:share] = self._source[:share]

        return timed(act)

    def _load(self) -> float:
        forget(*self._cell.files_of(self._saved))
        return timed(lambda: self._cell.do(load_command(self._model, self._saved, self._spec), StateLoaded))

    def _raw_read(self) -> float:
        return raw_read(self._cell.files_of(self._saved), self._target)

    def _keep(self, saved: StateSaved) -> None:
        """The latest version alone: the disk is small."""
        shutil.rmtree(self._cell.vault.version_dir(self._saved.version))
        self._saved = saved

    def _other_row(self) -> Row:
        """Another model's step, begun when the save has told that it writes."""
        self._cell.create(_OTHER, _OTHER_RANK)

        def step() -> float:
            return timed(lambda: self._cell.do(_forward_backward(_OTHER), ForwardBackwardDone))

        def disturbed() -> float:
            save = save_command(self._model)
            self._cell.send(save)
            self._cell.wait_writing(save)
            seconds = step()
            saved = self._cell.wait(save)
            assert isinstance(saved, StateSaved), saved
            self._keep(saved)
            return seconds

        pairs = in_turns(_STEP_PAIRS, disturbed, step)
        return Row("another's step during a save / undisturbed", self._case, pairs, "≤ 1.02")


def _forward_backward(model_id: str) -> ForwardBackward:
    tokens = struct.pack(f"<{_TOKENS}i", *(at % 250 for at in range(_TOKENS)))
    targets = Array("int64", (_TOKENS,), struct.pack(f"<{_TOKENS}q", *(at % 250 for at in range(_TOKENS))))
    weights = Array("float32", (_TOKENS,), struct.pack(f"<{_TOKENS}f", *[1.0] * _TOKENS))
    data = tuple(Datum(tokens, {"target_tokens": targets, "weights": weights}) for _ in range(_SEQUENCES))
    return ForwardBackward(new_id(), model_id, data, "cross_entropy", {}, False)


def _failure_row(ground: Ground, base_model: str, ranks: int) -> Row:
    """From the failed call on the last rank to the typed answer. The baseline is what is allowed: 100 ms."""
    told = ground.directory / "failed at"
    disturb = functools.partial(_fail_fsyncs, rank=ranks - 1, told=told)
    times = []
    with cell(ground.directory, base_model, ranks, disturb) as running:
        running.create(_MODEL, running.rank_of(5_000_000))
        for _ in range(_FAILURES):
            failed = running.fail(save_command(_MODEL))
            answered = time.monotonic()
            assert f"rank {ranks - 1}" in failed.message, failed
            times.append(answered - float(told.read_text()))
            # It goes on serving.
            running.do(nothing(_MODEL), GradientsDiscarded)
    return Row("one rank's EIO → typed answer / 100 ms", "5 MB", Pairs(tuple(times), (0.1,) * len(times)), "≤ 1")


def _fail_fsyncs(at: int, rank: int, told: Path) -> None:
    """In the ranks, before the cell is built: on `rank` every fsync of a shard fails."""
    if at != rank:
        return
    real = Disk.fsync

    def fsync(self: Disk, descriptor: int, path: Path) -> None:
        if path.suffix != ".safetensors":
            real(self, descriptor, path)
            return
        told.write_text(repr(time.monotonic()))

        def fail() -> None:
            raise OSError(errno.EIO, "injected")

        self.call("fsync", path, fail)

    Disk.fsync = fsync  # type: ignore[method-assign]
