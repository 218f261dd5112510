"""`python -m gateway` is `cellgate gateway`."""

from __future__ import annotations

import sys

from gateway.cli import main

if __name__ == "__main__":
    main(["gateway", *sys.argv[1:]])
