"""The committed document is the application's, and describes every body and refusal."""

from __future__ import annotations

from typing import Any, cast

from gateway.app import create_app
from gateway.http.auth import OPEN_PATHS
from gateway.scheduling.scheduler import Scheduler
from openapi.export import is_stale


def document() -> dict[str, Any]:
    return create_app(cast(Scheduler, None), keys={}).openapi()


def test_the_committed_document_is_up_to_date() -> None:
    assert not is_stale()


def test_every_reference_points_at_something() -> None:
    made = document()
    wanted: set[str] = set()

    def collect(node: object) -> None:
        if isinstance(node, dict):
            wanted.update(value for key, value in node.items() if key == "$ref")
            for value in node.values():
                collect(value)
        elif isinstance(node, list):
            for value in node:
                collect(value)

    collect(made)
    assert {f"#/components/schemas/{name}" for name in made["components"]["schemas"]} >= wanted
    assert len(wanted) > 20


def test_every_route_that_writes_describes_its_body() -> None:
    without = {"/api/v1/client/config", "/api/v1/client/dynamic_config", "/api/v1/telemetry"}
    for path, operations in document()["paths"].items():
        if "post" in operations and path not in without:
            assert "requestBody" in operations["post"], path


def test_every_route_but_health_needs_a_key() -> None:
    for path, operations in document()["paths"].items():
        for operation in operations.values():
            assert ("security" in operation) == (path not in OPEN_PATHS), path


def test_no_route_answers_409() -> None:
    for path, operations in document()["paths"].items():
        for operation in operations.values():
            assert "409" not in operation["responses"], path
