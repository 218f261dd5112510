"""What the gateway and a cell know of each other when one of them is new, and what is lost when the cell goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from gateway.scheduling.cell_link import CellLink
from gateway.scheduling.identity import new_command_id
from gateway.scheduling.model_queue import ModelQueue
from gateway.scheduling.residency import Residency
from trainer_cell.protocol.commands import ForgetModels
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import Hello, ResidentModel
from trainer_cell.vault.errors import VaultError
from trainer_cell.vault.layout import Vault
from trainer_cell.vault.publish import sweep_staging

log = logging.getLogger(__name__)


class CellEpoch:
    """One life of the cell after the other.

    hello: of the cell attached now or last. is_settled: one is attached, and both sides agree on what is resident.
    """

    def __init__(self, link: CellLink, vault: Vault, queues: Mapping[str, ModelQueue], residency: Residency) -> None:
        self.hello: Hello | None = None
        self.is_settled = False
        self._link = link
        self._vault = vault
        self._queues = queues
        self._residency = residency
        # Lost with the last connection, but not by a command of their own: if that very cell comes back, so do they.
        self._adoptable: dict[str, None] = {}

    def lose(self, hello: Hello) -> None:
        """The connection ended: every resident model is lost."""
        self.is_settled = False
        self._adoptable.clear()
        for model_id in self._residency.clear():
            queue = self._queues[model_id]
            queue.model.state = "lost"
            queue.model.trouble = CommandFailed(
                ErrorKind.MODEL_LOST,
                f"the trainer cell that held model {model_id} was lost; load a checkpoint into the model to go on",
            )
            if queue.running is None:
                self._adoptable[model_id] = None
        log.warning("cell epoch %s was lost", hello.epoch)

    async def settle(self, hello: Hello) -> list[ModelQueue]:
        """Take on a cell that attached: have it free what we do not know, adopt what we do; the adopted.

        Raises `CellLost`, or `CommandFailed` when the cell cannot even forget.
        """
        is_same_life = self.hello is not None and self.hello.epoch == hello.epoch
        self.hello = hello
        log.info("cell epoch %s attached: %s, %d ranks", hello.epoch, hello.base_model.name, hello.layout.world)
        known = [resident for resident in hello.models if is_same_life and self._is_ours(resident)]
        if len(known) < len(hello.models):
            keep = tuple(resident.model_id for resident in known)
            await self._link.execute(ForgetModels(new_command_id(), keep))
        if not is_same_life:
            await self._sweep()
        if self._link.hello is not hello:
            return []
        self.is_settled = True
        return [self._adopt(resident) for resident in known if self._is_ours(resident)]

    def _is_ours(self, resident: ResidentModel) -> bool:
        if resident.model_id not in self._adoptable:
            return False
        model = self._queues[resident.model_id].model
        return model.state == "lost" and (model.step, model.adapter) == (resident.step, resident.adapter)

    def _adopt(self, resident: ResidentModel) -> ModelQueue:
        queue = self._queues[resident.model_id]
        queue.model.state, queue.model.trouble = "ready", None
        self._residency.touch(resident.model_id)
        return queue

    async def _sweep(self) -> None:
        try:
            removed = await asyncio.to_thread(sweep_staging, self._vault)
        except VaultError as error:
            log.warning("staging could not be swept: %s", error)
        else:
            if removed:
                log.info("swept what dead cells had staged: %d entries", len(removed))
