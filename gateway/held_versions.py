"""What the models of a service that is down still need on disk, held while a command line removes checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from gateway.scheduling.futures import FutureBook
from gateway.scheduling.model_queue import KeyBook
from gateway.scheduling.restored import Restored
from gateway.scheduling.sessions import SessionBook
from gateway.state_directory import StateDirectory
from gateway.store.errors import JournalInUse
from gateway.store.shut import read_shut
from trainer_cell.vault.layout import Vault


@contextmanager
def held_for_models(state: StateDirectory, vault: Vault) -> Iterator[None]:
    """Until the end of the block nobody removes a version that a model of that state would be brought back from: it is
    leased, as the service does when it starts. A service that runs does so itself. Raises `JournalUnusable`."""
    with ExitStack() as held:
        if state.journal_path().exists():
            try:
                stored = held.enter_context(read_shut(state.journal_url()))
            except JournalInUse:
                pass
            else:
                for queue in Restored(stored, vault, SessionBook(), FutureBook(), KeyBook()).queues:
                    held.callback(queue.history.end)
        yield
