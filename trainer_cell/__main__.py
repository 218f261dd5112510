"""`torchrun … -m trainer_cell`: one rank of a trainer cell."""

from __future__ import annotations

import logging
import os
import sys
import warnings

from trainer_cell.watchdog import AGENT_PID, die_with_parent


def main() -> None:
    die_with_parent(int(os.environ.get(AGENT_PID, "0")))
    rank = int(os.environ["RANK"])
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format=f"%(asctime)s rank {rank} %(name)s %(levelname)s: %(message)s"
    )
    # What megatron-core has to say of kernels that are not installed is no news here.
    logging.getLogger("megatron").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="megatron")
    # Imports wait: torch takes seconds, in which the parent may die, and bad options are told before.
    from trainer_cell.settings import CellSettings

    settings = CellSettings()  # type: ignore[call-arg]  # from the command line
    from trainer_cell.assembly import CannotStart, run_cell

    try:
        run_cell(settings)
    except CannotStart as reason:
        sys.exit(f"the trainer cell cannot start: {reason}")


if __name__ == "__main__":
    main()
