"""Every operation of the OpenAPI document, as something that can be sent."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from gateway.http.auth import OPEN_PATHS
from tests.gateway.http.running import RunningGateway


@dataclass(frozen=True)
class Route:
    method: str
    path: str
    has_body: bool

    def filled(self, value: str = "x") -> str:
        """With something in place of each parameter."""
        return re.sub(r"{[^}]*}", value, self.path)


def all_routes(gateway: RunningGateway, *, is_open: bool = False) -> list[Route]:
    document: dict[str, Any] = gateway.app.openapi()
    return [
        Route(method.upper(), path, "requestBody" in operation or path.endswith(("config", "telemetry")))
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if (path in OPEN_PATHS) == is_open
    ]
