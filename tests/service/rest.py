"""The plain REST face, as somebody with curl would use it."""

from __future__ import annotations

from typing import Any

import httpx

from tests.service.running import API_KEY, RunningService


class Rest:
    def __init__(self, service: RunningService, key: str = API_KEY) -> None:
        self.http = httpx.Client(base_url=service.url, headers={"X-API-Key": key}, timeout=60)

    def run(self, method: str, path: str, body: dict[str, Any] | None = None, **headers: str) -> dict[str, Any]:
        """A write and its operation, waited for."""
        answer = self.http.request(method, path, json=body, headers=headers)
        assert answer.status_code == 202, answer.text
        return self.wait(answer.headers["Location"])

    def wait(self, location: str) -> dict[str, Any]:
        while True:
            operation: dict[str, Any] = self.http.get(location, params={"wait": 20}).raise_for_status().json()
            if operation["state"] in ("succeeded", "failed"):
                return operation

    def get(self, path: str) -> dict[str, Any]:
        return self.http.get(path).raise_for_status().json()  # type: ignore[no-any-return]
