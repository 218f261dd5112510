"""The checkpoint root alone, without a cell around it: one save, one load, and many models at once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.adapters import State, publish, state_of
from bench.ground import Ground, empty, forget, raw_read, raw_write
from bench.ratios import Row, in_turns, timed
from trainer_cell.vault.layout import Vault
from trainer_cell.vault.manifest import read_manifest
from trainer_cell.vault.shard_layout import KeptMemory, image_memory
from trainer_cell.vault.verify import TensorReader

MANY = 32
_MANY_BYTES = 5_000_000
_MANY_PAIRS = 20


def save_rows(ground: Ground, sizes: list[int], pairs: dict[int, int]) -> Iterator[Row]:
    for megabytes in sizes:
        state = state_of(megabytes * 1_000_000)
        vault = _vault(ground)
        versions: list[Path] = []

        def save(vault: Vault = vault, state: State = state, versions: list[Path] = versions) -> float:
            seconds = timed(lambda: versions.append(publish(vault, state, "model")))
            while len(versions) > 1:
                shutil.rmtree(versions.pop(0))
            return seconds

        def raw(state: State = state) -> float:
            return raw_write(ground.directory, state.image[: state.layout.size])

        reach = "≤ 1.0" if megabytes >= 50 else "≤ 1.6"
        yield Row("save, vault alone / raw write", f"{megabytes} MB", in_turns(pairs[megabytes], save, raw), reach)
        empty(ground.directory)


def load_rows(ground: Ground, sizes: list[int], pairs: dict[int, int]) -> Iterator[Row]:
    for megabytes in sizes:
        state = state_of(megabytes * 1_000_000)
        version = publish(_vault(ground), state, "model")
        files = sorted(version.iterdir())
        live, memory = image_memory(state.layout.size), image_memory(state.layout.size)
        live[:] = memory[:] = state.image
        reader, kept = TensorReader(state.wanted), KeptMemory()

        def load(
            version: Path = version, reader: TensorReader = reader, live: memoryview = live, kept: KeptMemory = kept
        ) -> float:
            forget(*version.iterdir())

            def act() -> None:
                read, places = reader.read(version, read_manifest(version), allocate=kept)
                begin, end = min(first for first, _ in places.values()), max(last for _, last in places.values())
                live[begin:end] = read[begin:end]

            return timed(act)

        def raw(files: list[Path] = files, memory: memoryview = memory) -> float:
            return raw_read(files, memory)

        yield Row(
            "load into place, vault alone / raw cold read",
            f"{megabytes} MB",
            in_turns(pairs[megabytes], load, raw),
            "≤ 1.1",
        )
        empty(ground.directory)


def many_rows(ground: Ground) -> Iterator[Row]:
    """Many saves at once, in as many threads."""
    state = state_of(_MANY_BYTES)
    vault = _vault(ground)
    latest: dict[str, Path] = {}

    def save(model_id: str) -> None:
        old = latest.get(model_id)
        latest[model_id] = publish(vault, state, model_id)
        if old is not None:
            doomed.append(old)

    doomed: list[Path] = []
    models = [f"model-{at}" for at in range(MANY)]
    all_bytes = image_memory(state.layout.size * MANY)[: state.layout.size * MANY]
    all_bytes[:] = bytes(state.image[: state.layout.size]) * MANY

    def clean() -> None:
        while doomed:
            shutil.rmtree(doomed.pop())

    with ThreadPoolExecutor(MANY) as threads:

        def at_once() -> float:
            seconds = timed(lambda: list(threads.map(save, models)))
            clean()
            return seconds

        def alone() -> float:
            seconds = timed(lambda: save(models[0]))
            clean()
            return seconds * MANY

        case = f"{MANY} × {_MANY_BYTES // 1_000_000} MB"
        raw = in_turns(_MANY_PAIRS, at_once, lambda: raw_write(ground.directory, all_bytes))
        yield Row("saves at once / the same bytes in one raw write", case, raw, f"≤ {1 / 0.9:.2f}")
        yield Row(
            "saves at once / one after the other", case, in_turns(_MANY_PAIRS, at_once, alone), f"≤ {1 / 2.7:.2f}"
        )
    empty(ground.directory)


def _vault(ground: Ground) -> Vault:
    vault = Vault(ground.directory / "vault")
    vault.create()
    return vault
