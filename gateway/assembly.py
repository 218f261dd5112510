"""Puts the gateway's process together: HTTP over the scheduler, over the vault and the socket a cell dials."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn

from gateway.app import Server, create_app
from gateway.exit_status import NOT_AGAIN
from gateway.http.limits import Limits
from gateway.import_child import ImportChild
from gateway.keys import keys_in_force
from gateway.listener import open_listener, url_of
from gateway.scheduling.catalog import Catalog
from gateway.scheduling.cell_link import CellLink
from gateway.scheduling.identity import tenant_digester
from gateway.scheduling.imports import Imports
from gateway.scheduling.restored import outcomes_of
from gateway.scheduling.scheduler import Scheduler
from gateway.scheduling.start_up import StartUpFailed, first_model_made, submit_first_model
from gateway.scheduling.sweeper import Sweeper, log_recovery
from gateway.settings import GatewayProcessSettings
from gateway.state_directory import StateDirectory, StateUnusable
from gateway.store.journal import Journal, JournalUnusable
from gateway.store.records import Stored
from trainer_cell.vault.collect import Collector
from trainer_cell.vault.errors import VaultError
from trainer_cell.vault.layout import Vault
from trainer_cell.vault.startup import RecoveryReport, recover

# What is still under way when the scheduler has stopped are answers being sent.
_LAST_ANSWERS_S = 3


def run(settings: GatewayProcessSettings) -> int:
    """Serve until SIGTERM or SIGINT; the process's exit status."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s: %(message)s")
    state, vault = StateDirectory(settings.state), Vault(settings.checkpoint_root)
    try:
        state.create()
        keys, secret = keys_in_force(settings, state), state.tenant_secret()
        socket_path = settings.gateway_socket or state.socket_path()
        vault.create()
        with vault.lock():
            journal = Journal.open(state.journal_url())
            catalog = Catalog(vault, tenant_digester(secret), settings.tenant_quota_bytes)
            scheduler = Scheduler(
                CellLink(socket_path),
                catalog,
                journal,
                rules=settings.snapshot_rules,
                idle_model_s=settings.idle_model_days * 86_400,
            )
            # Leases what models still need, so it comes before anything is collected.
            stored = journal.load()
            scheduler.restore(stored)
            # Before the port answers: nobody is shown a checkpoint that is not settled.
            recovered = recover(vault, outcomes_of(stored))
            log_recovery(recovered)
            listener = _listener(settings)
            if settings.listen_fd is None:
                # Nobody supervises this process, so nobody else tells.
                sys.stdout.write(f"cellgate gateway {url_of(settings.host, listener)} cell socket {socket_path}\n")
                sys.stdout.flush()
            serving = _serve(settings, scheduler, stored, recovered, keys, listener)
            return asyncio.run(_closing(journal, serving))
    except StartUpFailed as error:
        sys.stderr.write(f"cellgate: {error}\n")
        return NOT_AGAIN
    except (StateUnusable, JournalUnusable, VaultError, OSError) as error:
        sys.stderr.write(f"cellgate: {error}\n")
        return 1


def _listener(settings: GatewayProcessSettings) -> socket.socket:
    if settings.listen_fd is not None:
        return socket.socket(fileno=settings.listen_fd)
    return open_listener(settings.host, settings.port)


class _SignalledServer(Server):
    """uvicorn's own handling of signals ends the process by the signal, also after an orderly stop."""

    has_crashed = False

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    def crash(self) -> None:
        self.has_crashed = self.should_exit = True


async def _closing(journal: Journal, serving: Coroutine[Any, Any, int]) -> int:
    """Answers are told to the very end, and that they were is in the journal too."""
    try:
        return await serving
    finally:
        await journal.close()


async def _serve(
    settings: GatewayProcessSettings,
    scheduler: Scheduler,
    stored: Stored,
    recovered: RecoveryReport,
    keys: dict[str, str],
    listener: socket.socket,
) -> int:
    """Raises `StartUpFailed`."""

    def on_crash() -> None:
        server.crash()

    scheduler.on_crash = on_crash
    catalog = scheduler.catalog
    first = await submit_first_model(scheduler, next(iter(keys.values())), settings.start_up)
    limits = Limits(max_body_bytes=settings.max_body_mb << 20, stop_grace_s=settings.stop_grace_s)
    collector = Collector(catalog.vault, settings.rules, catalog.inventory)
    sweeper = Sweeper(catalog.vault, collector, settings.sweep_interval_s, recovered, on_crash=on_crash)
    app = create_app(scheduler, keys, limits, sweeper, _imports(settings, scheduler, stored))
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=_LAST_ANSWERS_S,
        # Longer than clients keep idle connections: one must not be closed just when it is used again.
        timeout_keep_alive=75,
    )
    server = _SignalledServer(config, app)
    resuming = asyncio.create_task(first_model_made(scheduler, first))
    resuming.add_done_callback(lambda task: server.crash() if not task.cancelled() and task.exception() else None)
    await server.serve(sockets=[listener])
    resuming.cancel()
    with suppress(asyncio.CancelledError):
        await resuming
    return 1 if server.has_crashed or not server.started else 0


def _imports(settings: GatewayProcessSettings, scheduler: Scheduler, stored: Stored) -> Imports | None:
    """What was accepted when imports were allowed waits until they are again."""
    if not settings.import_dir:
        return None
    assert settings.base_model is not None  # the settings see to it
    child = ImportChild(scheduler.catalog, settings.base_model, settings.cache)
    imports = Imports(scheduler.futures, scheduler.journal, settings.import_dir, child.run)
    imports.restore(stored)
    return imports
