"""torchrun for `cellgate serve`: the same program, which takes SIGTERM for the orderly end it is.

torchrun itself stops its ranks on SIGTERM, and then ends with a traceback.
"""

from __future__ import annotations

import os
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main

from trainer_cell.watchdog import AGENT_PID


def run() -> None:
    """The options are torchrun's own."""
    os.environ[AGENT_PID] = str(os.getpid())
    try:
        main()
    except SignalException:
        sys.exit(0)


if __name__ == "__main__":
    run()
