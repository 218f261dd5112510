"""One turn on the cell: what was asked becomes a command, and what the cell answered becomes the model's new state."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial

from gateway.scheduling.admission import check_create, deadline_s
from gateway.scheduling.catalog import Catalog
from gateway.scheduling.cell_link import CellLink, CellLost, Flight
from gateway.scheduling.durable import durable
from gateway.scheduling.futures import Future
from gateway.scheduling.identity import command_id_of, new_command_id, timestamp
from gateway.scheduling.loadable import find_loadable
from gateway.scheduling.model_queue import ModelQueue
from gateway.scheduling.requests import (
    CreateFromCheckpointRequest,
    CreateRequest,
    ForwardBackwardRequest,
    ImportRequest,
    LoadRequest,
    OptimStepRequest,
    RejectedRequest,
    SaveRequest,
    UnloadRequest,
)
from gateway.scheduling.residency import Residency
from gateway.scheduling.saving import OpenSave
from gateway.scheduling.settlement import settle_forgotten, settle_save
from gateway.store.journal import Journal
from trainer_cell.protocol.commands import (
    AdapterSpec,
    CreateModel,
    DiscardGradients,
    ForwardBackward,
    FreeModel,
    LoadState,
    OptimStep,
    SaveState,
)
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import (
    Hello,
    ModelFreed,
    StateLoaded,
    StateSaved,
    Success,
)

log = logging.getLogger(__name__)


class Publishing:
    """A captured save on its way to the disk."""

    def __init__(
        self, link: CellLink, catalog: Catalog, future: Future, epoch: str, flight: Flight, save: OpenSave
    ) -> None:
        self._link, self._catalog = link, catalog
        self._future, self._epoch, self._flight, self._save = future, epoch, flight, save

    async def outcome(self) -> Success:
        """Once it is published. Raises `CommandFailed`, or `CellLost` if the cell went and left no whole version."""
        try:
            return await self._flight.outcome()
        except CellLost:
            saved = await settle_save(self._catalog.vault, self._future, self._epoch, self._is_cell_back)
            if saved is None:
                raise
            log.warning("the cell was lost while it saved %s, which is complete", saved.version)
            return saved
        finally:
            self._catalog.saves.close(self._save)

    def _is_cell_back(self) -> bool:
        """Also for another thread to ask."""
        hello = self._link.hello
        return hello is not None and hello.epoch == self._epoch


class Dispatcher:
    """Runs one command of a client at a time, of a model that is in a slot or about to get one.

    make_room: has a slot free for a model.
    """

    def __init__(
        self,
        link: CellLink,
        catalog: Catalog,
        journal: Journal,
        residency: Residency,
        make_room: Callable[[Hello, str], Awaitable[None]],
    ) -> None:
        self._link = link
        self._catalog = catalog
        self._journal = journal
        self._residency = residency
        self._make_room = make_room

    async def run(self, queue: ModelQueue, future: Future, hello: Hello) -> Success:
        """Raises `CommandFailed` with the model as it was, or `CellLost`."""
        match future.request:
            case CreateRequest():
                return await self._create(queue, future, future.request, hello)
            case CreateFromCheckpointRequest() | LoadRequest():
                return await self._load(queue, future, future.request, hello)
            case ForwardBackwardRequest():
                return await self._forward_backward(queue, future, future.request)
            case OptimStepRequest():
                return await self._optim_step(queue, future, future.request)
            case UnloadRequest():
                return await self._unload(queue, future)
            case SaveRequest() | RejectedRequest() | ImportRequest():
                raise AssertionError("a save is captured, the others are answered without the cell")

    async def _create(self, queue: ModelQueue, future: Future, request: CreateRequest, hello: Hello) -> Success:
        model = queue.model
        check_create(request, hello)
        assert model.adapter is not None
        assert model.seed is not None
        await self._make_room(hello, model.model_id)
        created = await self._link.execute(
            CreateModel(
                command_id_of(future.request_id),
                model.model_id,
                model.adapter,
                model.seed,
                request.lr_schedule,
                turn=queue.turn + 1,
            )
        )
        self.note_made(queue, hello, model.adapter)
        return created

    def note_made(self, queue: ModelQueue, hello: Hello, adapter: AdapterSpec) -> None:
        """The model is in a slot of that cell now, with a state of its own."""
        model = queue.model
        model.base_model, model.base_digest = hello.base_model.name, hello.base_model.digest
        model.adapter = adapter
        self._residency.touch(model.model_id)

    async def _load(
        self, queue: ModelQueue, future: Future, request: CreateFromCheckpointRequest | LoadRequest, hello: Hello
    ) -> Success:
        model = queue.model
        source = await find_loadable(
            self._catalog, model.tenant, request.path, request.load_optimizer, hello, model.adapter
        )
        if future.lease is not None:
            future.lease.release()
        future.version, future.lease = source.version, source.lease
        # What it read must be known should the answer come to another gateway than this.
        await durable(partial(self._journal.note_version, future.request_id, source.version))
        await self._make_room(hello, model.model_id)
        loaded = await self._link.execute(
            LoadState(
                command_id_of(future.request_id),
                model.model_id,
                source.version,
                source.adapter,
                request.load_optimizer,
                turn=queue.turn + 1,
            )
        )
        assert isinstance(loaded, StateLoaded)
        self.note_made(queue, hello, source.adapter)
        return loaded

    async def _forward_backward(self, queue: ModelQueue, future: Future, request: ForwardBackwardRequest) -> Success:
        model_id = queue.model.model_id
        self._residency.touch(model_id)
        return await self._link.execute(
            ForwardBackward(
                command_id_of(future.request_id),
                model_id,
                request.data,
                request.loss,
                request.loss_config,
                request.forward_only,
                turn=queue.turn + 1,
                deadline_s=deadline_s(future.operation, future.payload_bytes),
            )
        )

    async def _optim_step(self, queue: ModelQueue, future: Future, request: OptimStepRequest) -> Success:
        model_id, turn = queue.model.model_id, queue.turn + 1
        self._residency.touch(model_id)
        if queue.window.is_partial_for(future):
            await self._link.execute_own(DiscardGradients(new_command_id(), model_id, turn=turn))
            raise CommandFailed(
                ErrorKind.PARTIAL_GRADIENTS,
                "a forward_backward of this step failed, so its gradient is incomplete: no step was made, and the "
                "accumulated gradient was dropped",
            )
        command_id = command_id_of(future.request_id)
        return await self._link.execute(OptimStep(command_id, model_id, request.adam, request.scheduled, turn=turn))

    async def capture(self, future: Future, request: SaveRequest) -> Publishing:
        """Have the model's state copied for a save; what follows in training does not reach it.

        Raises `CommandFailed` or `CellLost`.
        """
        hello = self._link.hello
        if hello is None:
            raise CellLost("the trainer cell was lost before the command was sent")
        self._residency.touch(future.model_id)
        saves = self._catalog.saves
        save = await saves.open(future, request, command_id_of(future.request_id))
        try:
            command = self._save_command(save, hello)
            flight = await self._link.capture(command, save.note_progress)
            if flight.answer.done():
                await flight.outcome()  # a failure before the capture is this call's
        except BaseException:
            saves.close(save)
            raise
        return Publishing(self._link, self._catalog, future, hello.epoch, flight, save)

    async def settled(self, future: Future, failure: CommandFailed) -> Success | CommandFailed:
        """The failure of a save; but its success, where the name is taken by what an earlier attempt of it made."""
        if failure.kind is not ErrorKind.CHECKPOINT_EXISTS:
            return failure
        return await self.made_before(future) or failure

    async def made_before(self, future: Future) -> StateSaved | None:
        """What an earlier attempt of a save made, if it was lost before it was heard of."""
        hello = self._link.hello
        return None if hello is None else await settle_forgotten(self._catalog.vault, future, hello.epoch)

    def adopted(self, future: Future, flight: Flight, epoch: str) -> Publishing:
        """A save that was captured for a gateway that is no more."""
        assert isinstance(future.request, SaveRequest)
        save = self._catalog.saves.adopt(future, future.request, flight.command_id)
        return Publishing(self._link, self._catalog, future, epoch, flight, save)

    def _save_command(self, save: OpenSave, hello: Hello) -> SaveState:
        future, request, now = save.future, save.request, datetime.now(UTC)
        ttl_s = request.ttl_seconds
        return SaveState(
            command_id=save.command_id,
            model_id=future.model_id,
            name=request.name,
            kind=request.kind,
            overwrite=request.overwrite,
            include_optimizer=request.kind == "weights" and not hello.no_save_optim,
            tenant_digest=self._catalog.tenant_digest(future.tenant),
            created=timestamp(now),
            expires=timestamp(now + timedelta(seconds=ttl_s)) if ttl_s is not None else None,
            user_metadata=request.user_metadata,
            quota=save.quota,
        )

    async def _unload(self, queue: ModelQueue, future: Future) -> Success:
        model_id = queue.model.model_id
        command = FreeModel(command_id_of(future.request_id), model_id)
        try:
            freed = await self._link.execute(command)
        except CellLost:
            # Gone with its cell: that is what was asked for.
            freed = ModelFreed(command.command_id, was_resident=True)
        self._residency.leave(model_id)
        return freed
