"""`python -m trainer_cell.training.prepare_base NAME_OR_PATH [--cache DIR]`: prints the prepared directory.

A base model that the cell cannot carry, or not in the layout of `--tp` and `--pp`, is refused here, before a cell is
started.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trainer_cell.training.base_models import BaseUnavailable, default_cache, prepare, prepare_weights
from trainer_cell.training.model_shape import UnsupportedBase, check_layout, read_shape
from trainer_cell.training.safetensors_files import DamagedBase


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="prepare_base", description="Bring a base model into the cache, once.")
    parser.add_argument("name_or_path", help="smollm2-135m, tiny, a directory, or a hub id")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="default: %(default)s")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks it must be able to be split over")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages it must be able to be split over")
    parser.add_argument("--weights", type=Path, help="torch_dist checkpoint whose weights take the place of its own")
    options = parser.parse_args(arguments)
    try:
        directory = prepare(options.name_or_path, options.cache)
        if options.weights is not None:
            directory = prepare_weights(directory, options.weights, options.cache)
        check_layout(read_shape(directory), options.tp, options.pp)
    except (BaseUnavailable, DamagedBase, UnsupportedBase) as problem:
        sys.stderr.write(f"{problem}\n")
        return 1
    sys.stdout.write(f"{directory}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
