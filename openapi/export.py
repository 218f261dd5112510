"""Write openapi/gateway.json from the application; with --check, say whether it is stale."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import cast

from gateway.app import create_app
from gateway.scheduling.scheduler import Scheduler

TARGET = Path(__file__).resolve().parent / "gateway.json"


def rendered() -> str:
    # The document depends on the routes alone; nothing here is started.
    app = create_app(cast(Scheduler, None), keys={})
    return json.dumps(app.openapi(), indent=2, sort_keys=True) + "\n"


def is_stale() -> bool:
    return not TARGET.exists() or TARGET.read_text() != rendered()


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit("openapi/gateway.json is stale: run python -m openapi.export" if is_stale() else 0)
    TARGET.write_text(rendered())
