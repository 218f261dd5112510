"""`python -m bench.checkpoint`: what saves and loads cost, against the disk and against memory.

Every ratio is that of a thing to its baseline, measured in turns in this run. Absolute times say little on a machine
that is shared; ratios of minima say most.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from bench.ground import Ground, ground
from bench.ratios import Row, table
from bench.vault_rows import load_rows, many_rows, save_rows

_GROUPS = ("vault", "many", "cell", "neighbours")
# A warm-up comes on top.
_PAIRS = {5: 30, 50: 20}
_PAIRS_OF_LARGE = 5


def main() -> None:
    asked = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing stays mounted
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of the ranks: what megatron-core lacks is no news
    pairs = {size: asked.pairs or _PAIRS.get(size, _PAIRS_OF_LARGE) for size in asked.sizes}
    # Old and new version, the raw file, and room to breathe; many at once need four times their bytes.
    room = max(6 * max(asked.sizes) * 1_000_000, 1 << 30)
    with ground(asked.directory, room) as place:
        print(_machine(place), flush=True)
        for title, rows in _tables(asked, place, pairs):
            print(table(title, rows), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.checkpoint", description=__doc__)
    parser.add_argument("--sizes", type=_numbers, default=[5, 50, 500], help="megabytes of a state, by commas")
    parser.add_argument("--ranks", type=_numbers, default=[1, 2], help="of the cells, by commas")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(_GROUPS), help=",".join(_GROUPS))
    parser.add_argument("--pairs", type=int, help="of measurements; default: fewer for larger sizes")
    parser.add_argument("--base-model", default="tiny", help="of the cells")
    parser.add_argument("--directory", type=Path, help="a directory on the disk in question")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _machine(place: Ground) -> str:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    libraries = ", ".join(f"{name} {version(name)}" for name in ("cellgate", "torch", "safetensors", "xxhash"))
    return (
        f"{os.cpu_count()} CPUs, {total >> 30} GiB, load {os.getloadavg()[0]:.1f}, Linux {platform.release()}, "
        f"Python {platform.python_version()}, {libraries}\ndisk: {place.state}\n"
        "times: least / median of the pairs; ratio: of the least ones, (median): of the pairs' ratios\n"
    )


def _tables(asked: argparse.Namespace, place: Ground, pairs: dict[int, int]) -> Iterator[tuple[str, list[Row]]]:
    if "vault" in asked.only:
        yield (
            "The checkpoint root alone",
            [*save_rows(place, asked.sizes, pairs), *load_rows(place, asked.sizes, pairs)],
        )
    if "many" in asked.only:
        yield "Many models at once", list(many_rows(place))
    if "cell" in asked.only:
        from bench.cell_rows import cell_rows  # torch

        for ranks in asked.ranks:
            yield f"Whole cells, {ranks} ranks", list(cell_rows(place, asked.base_model, ranks, asked.sizes, pairs))
    if "neighbours" in asked.only:
        from bench.neighbours import neighbour_rows

        yield "Neighbours, same bytes, same disk", list(neighbour_rows(place, asked.sizes, pairs))


if __name__ == "__main__":
    main()
