"""A scheduler over a real socket and a real checkpoint root, for a fake cell to dial, and short words for requests."""

from __future__ import annotations

import array
import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.scheduling.catalog import Catalog
from gateway.scheduling.cell_link import CellLink
from gateway.scheduling.futures import Future
from gateway.scheduling.identity import tenant_digester
from gateway.scheduling.journal_rows import session_record
from gateway.scheduling.requests import (
    CreateFromCheckpointRequest,
    CreateRequest,
    ForwardBackwardRequest,
    LoadRequest,
    OptimStepRequest,
    RejectedRequest,
    Request,
    SaveRequest,
)
from gateway.scheduling.scheduler import Scheduler
from gateway.store.journal import Journal
from tests.fakes.fake_cell import PATIENCE_S, FakeCell, Hold
from trainer_cell.protocol.commands import AdamParams, Array, Datum
from trainer_cell.protocol.errors import ErrorKind
from trainer_cell.protocol.outcomes import Success
from trainer_cell.vault.layout import Vault

SECRET = b"tests"
ADAM = AdamParams(0.1, 0.9, 0.95, 1e-12, 0.0, 0.0)


@dataclass
class Rig:
    socket_path: Path
    vault: Vault
    link: CellLink
    scheduler: Scheduler

    def cell(self, **options: Any) -> FakeCell:
        return FakeCell(self.socket_path, self.vault.root, **options)

    def submit(self, model_id: str, *requests: Request, tenant: str = "alice", first: int = 1) -> list[Future]:
        """The requests one after the other, numbered from `first`, without waiting."""
        return [
            self.scheduler.submit(tenant, model_id, seq_id, request) for seq_id, request in enumerate(requests, first)
        ]

    def session(self, tenant: str = "alice") -> str:
        session = self.scheduler.sessions.open(tenant)
        self.scheduler.journal.open_session(session_record(session), lambda: None, lambda why: None)
        return session.session_id

    async def model(self, tenant: str = "alice", **options: Any) -> str:
        """The id of a fresh model that is ready."""
        future = self.scheduler.submit_create(tenant, self.session(tenant), 0, create(**options))
        await succeeded(future)
        return future.model_id

    async def captured(self, saving: Future) -> None:
        """Until the ranks are free of a save: another model has had its turn since."""
        while saving.state != "writing":
            await self.model()
        await self.model()

    def version_dir(self, saved: Success | None) -> Path:
        return self.vault.version_dir(saved.version)  # type: ignore[union-attr]


@asynccontextmanager
async def rig(root: Path, **options: Any) -> AsyncIterator[Rig]:
    vault = Vault(root / "checkpoints")
    vault.create()
    # Paths of sockets are short, those of tests are not.
    with tempfile.TemporaryDirectory(prefix="cell") as directory:
        link = CellLink(Path(directory) / "cell.sock")
        journal = await asyncio.to_thread(Journal.open, f"sqlite:///{root / 'journal.sqlite3'}")
        scheduler = Scheduler(link, Catalog(vault, tenant_digester(SECRET)), journal, **options)
        scheduler.restore(journal.load())
        await scheduler.start()
        try:
            yield Rig(link.socket_path, vault, link, scheduler)
        finally:
            await scheduler.stop(grace_s=0)
            await journal.close()


@asynccontextmanager
async def rig_with_cell(root: Path, **cell: Any) -> AsyncIterator[tuple[Rig, FakeCell]]:
    async with rig(root) as gateway:
        with gateway.cell(**cell) as fake:
            await within(gateway.link.ready.wait())
            yield gateway, fake


async def within(awaitable: Any) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        return await awaitable


async def until(is_so: Callable[[], bool]) -> None:
    """For what tells nobody when it comes."""
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.001)


async def done(future: Future) -> Future:
    assert await future.wait(PATIENCE_S), f"{future.operation} is still {future.state}"
    return future


async def succeeded(future: Future) -> Any:
    await done(future)
    if future.error is not None:
        raise future.error
    return future.outcome


async def failed(future: Future) -> str:
    """The kind of the failure."""
    await done(future)
    assert future.error is not None, f"{future.operation} succeeded"
    return future.error.kind.value


async def reached(hold: Hold) -> None:
    await asyncio.to_thread(hold.wait_reached)


def create(rank: int = 4, seed: int | None = 7, base_model: str = "tiny", **flags: bool) -> CreateRequest:
    targets = {"train_attn": True, "train_mlp": True, "train_unembed": True, **flags}
    return CreateRequest(base_model, rank, seed, **targets, user_metadata={})


def forward_backward(*tokens: int, loss: str = "cross_entropy", only: bool = False) -> ForwardBackwardRequest:
    """One datum, each token with weight 1."""
    tokens = tokens or (1, 2, 3)
    shape = (len(tokens),)
    datum = Datum(
        array.array("i", tokens).tobytes(),
        {
            "target_tokens": Array("int64", shape, array.array("q", tokens).tobytes()),
            "weights": Array("float32", shape, array.array("f", [1.0] * len(tokens)).tobytes()),
        },
    )
    return ForwardBackwardRequest((datum,), loss, {}, only)


def optim_step(adam: AdamParams = ADAM) -> OptimStepRequest:
    return OptimStepRequest(adam)


def save(name: str = "n", overwrite: bool = False, ttl_seconds: int | None = None) -> SaveRequest:
    return SaveRequest(name, "weights", overwrite, ttl_seconds, {})


def save_for_sampler(name: str = "n") -> SaveRequest:
    return SaveRequest(name, "sampler_weights", False, None, {})


def load(path: str, load_optimizer: bool = True) -> LoadRequest:
    return LoadRequest(path, load_optimizer)


def create_from(path: str, load_optimizer: bool = True) -> CreateFromCheckpointRequest:
    return CreateFromCheckpointRequest(path, load_optimizer, {})


def path_of(model_id: str, name: str = "n", kind: str = "weights") -> str:
    return f"tinker://{model_id}/{kind}/{name}"


def rejected(operation: str = "forward_backward") -> RejectedRequest:
    return RejectedRequest(operation, ErrorKind.BAD_COMMAND, "the body makes no sense")
