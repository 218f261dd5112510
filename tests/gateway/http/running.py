"""A whole gateway on a loopback port, with a fake cell behind it; nothing in between is replaced."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from gateway.app import Server, create_app
from gateway.http import tinker_pb2 as pb
from gateway.http.limits import Limits
from gateway.scheduling.catalog import Catalog
from gateway.scheduling.cell_link import CellLink
from gateway.scheduling.identity import tenant_digester
from gateway.scheduling.imports import Imports
from gateway.scheduling.scheduler import Scheduler
from gateway.scheduling.sweeper import Sweeper
from gateway.store.journal import Journal
from gateway.store.records import Stored
from tests.fakes.fake_cell import FakeCell
from tests.gateway.http.listening import Listening, listening
from trainer_cell.vault.collect import Collector
from trainer_cell.vault.layout import Vault
from trainer_cell.vault.retention import Rules
from trainer_cell.vault.startup import recover

ALICE = "tml-alice"
BOB = "tml-bob"
KEYS = {ALICE: "alice", BOB: "bob"}
QUICK = Limits(poll_s=0.2, max_body_bytes=8 << 20, stop_grace_s=5)
PATIENCE_S = 20.0


class Client:
    """What the SDK does, call by call."""

    def __init__(self, url: str, key: str) -> None:
        self.http = httpx.Client(base_url=url, headers={"X-API-Key": key}, timeout=PATIENCE_S)

    def post(self, route: str, **body: Any) -> httpx.Response:
        return self.http.post(f"/api/v1/{route}", json=body)

    def call(self, route: str, **body: Any) -> Any:
        return self.post(route, **body).raise_for_status().json()

    def get(self, path: str, **query: Any) -> Any:
        return self.http.get(path, params=query).raise_for_status().json()

    def poll(self, request_id: str, accept: str = "application/json") -> httpx.Response:
        return self.http.post("/api/v1/retrieve_future", json={"request_id": request_id}, headers={"Accept": accept})

    def result(self, accepted: httpx.Response, accept: str = "application/json") -> httpx.Response:
        """The final answer for what `accepted` promised."""
        request_id = accepted.raise_for_status().json()["request_id"]
        while (answer := self.poll(request_id, accept)).status_code == 408:
            pass
        return answer.raise_for_status()

    def run(self, route: str, **body: Any) -> Any:
        return self.result(self.post(route, **body)).json()

    def session(self) -> str:
        return str(self.call("create_session", tags=[], user_metadata={}, sdk_version="0.38.0")["session_id"])

    def new_model(self, session_id: str | None = None, model_seq_id: int = 0, rank: int = 8) -> str:
        made = self.run(
            "create_model",
            session_id=session_id or self.session(),
            model_seq_id=model_seq_id,
            base_model="cellgate/tiny",
            lora_config={"rank": rank, "seed": 7},
        )
        return str(made["model_id"])

    def send_forward_backward(self, raw: bytes, **headers: str) -> httpx.Response:
        return self.http.post(
            "/api/v1/forward_backward", content=raw, headers={"Content-Type": "application/x-protobuf", **headers}
        )


def forward_backward(
    model_id: str, seq_id: int, length: int = 3, change: Callable[[pb.ForwardBackwardRequest], None] | None = None
) -> bytes:
    """One datum of `length` tokens, changed as told, serialised."""
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    datum = message.data.add()
    tokens = [index % 500 for index in range(length)]
    datum.model_input.add().encoded_text.tokens = struct.pack(f"<{length}i", *tokens)
    targets, weights = datum.loss_fn_inputs["target_tokens"], datum.loss_fn_inputs["weights"]
    targets.dense, targets.dtype = struct.pack(f"<{length}q", *tokens), pb.DTYPE_INT64
    weights.dense, weights.dtype = struct.pack(f"<{length}f", *[1.0] * length), pb.DTYPE_FLOAT32
    if change is not None:
        change(message)
    return message.SerializeToString()


class RunningGateway:
    def __init__(self, app: FastAPI, scheduler: Scheduler, where: Listening, socket_path: Path, root: Path) -> None:
        self.app = app
        self.scheduler = scheduler
        self.where = where
        self.root = root
        self.alice = Client(where.url, ALICE)
        self.bob = Client(where.url, BOB)
        self._socket_path = socket_path
        self.cell: FakeCell | None = None

    def attach_cell(self, **options: Any) -> FakeCell:
        """A new cell, attached and settled."""
        self.cell = FakeCell(self._socket_path, self.root, **{"slots": 64, **options}).start()
        while not httpx.get(f"{self.where.url}/readyz").is_success:
            pass
        return self.cell

    def close(self) -> None:
        self.alice.http.close()
        self.bob.http.close()
        if self.cell is not None:
            self.cell.kill()


@contextmanager
def running_gateway(
    directory: Path,
    limits: Limits = QUICK,
    cell: bool = True,
    port: int = 0,
    quota_bytes: int | None = None,
    rules: Rules | None = None,
    sweep_interval_s: float = 3600,
    imports: Callable[[Scheduler, Stored], Imports] | None = None,
) -> Iterator[RunningGateway]:
    """With a cell attached, unless told otherwise, and without imports. rules: recovers the root and sweeps, as a
    service does."""
    vault = Vault(directory / "checkpoints")
    vault.create()
    socket_path = directory / "run" / "cell.sock"
    catalog = Catalog(vault, tenant_digester(b"secret"), quota_bytes)
    journal = Journal.open(f"sqlite:///{directory / 'journal.sqlite3'}")
    scheduler = Scheduler(CellLink(socket_path), catalog, journal)
    stored = journal.load()
    scheduler.restore(stored)
    sweeper = None
    if rules is not None:
        collector = Collector(vault, rules, catalog.inventory)
        sweeper = Sweeper(vault, collector, sweep_interval_s, recover(vault), least_pause_s=0.02)
    app = create_app(scheduler, KEYS, limits, sweeper, imports(scheduler, stored) if imports else None)
    try:
        with listening(app, lambda config: Server(config, app), port) as where:
            running = RunningGateway(app, scheduler, where, socket_path, vault.root)
            try:
                if cell:
                    running.attach_cell()
                yield running
            finally:
                running.close()
    finally:
        asyncio.run(journal.close())
