"""One turn on the cell: what was asked becomes a command, and what the cell answered becomes the model's new state."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from gateway.scheduling.admission import check_create
from gateway.scheduling.catalog import Catalog
from gateway.scheduling.cell_link import CellLink, CellLost, Flight
from gateway.scheduling.futures import Future
from gateway.scheduling.identity import new_command_id, timestamp
from gateway.scheduling.loadable import find_loadable
from gateway.scheduling.model_queue import ModelQueue
from gateway.scheduling.models import Model
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
from gateway.scheduling.settlement import settle_save
from trainer_cell.protocol.commands import (
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
    OptimStepDone,
    StateLoaded,
    Success,
)

log = logging.getLogger(__name__)


class Publishing:
    """A captured save on its way to the disk."""

    def __init__(self, catalog: Catalog, command: SaveState, hello: Hello, flight: Flight, save: OpenSave) -> None:
        self._catalog, self._command, self._hello, self._flight, self._save = catalog, command, hello, flight, save

    async def outcome(self) -> Success:
        """Once it is published. Raises `CommandFailed`, or `CellLost` if the cell went and left no whole version."""
        try:
            return await self._flight.outcome()
        except CellLost:
            saved = await settle_save(self._catalog.vault, self._command, self._hello.epoch)
            if saved is None:
                raise
            log.warning("the cell was lost while it saved %s, which is complete", saved.version)
            return saved
        finally:
            self._catalog.saves.close(self._save)


class Dispatcher:
    """Runs one command at a time.

    may_give_way: whether a resident model may lose its slot to another; on_evicted: it has.
    """

    def __init__(
        self,
        link: CellLink,
        catalog: Catalog,
        residency: Residency,
        may_give_way: Callable[[str], bool],
        on_evicted: Callable[[str], None],
    ) -> None:
        self._link = link
        self._catalog = catalog
        self._residency = residency
        self._may_give_way = may_give_way
        self._on_evicted = on_evicted

    async def run(self, queue: ModelQueue, future: Future) -> Success:
        """Raises `CommandFailed` with the model as it was, or `CellLost`."""
        hello = self._link.hello
        if hello is None:
            raise CellLost("the trainer cell was lost before the command was sent")
        model = queue.model
        match future.request:
            case CreateRequest():
                return await self._create(model, future.request, hello)
            case CreateFromCheckpointRequest() | LoadRequest():
                return await self._load(queue, future.request, hello)
            case ForwardBackwardRequest():
                return await self._forward_backward(model, future.request)
            case OptimStepRequest():
                return await self._optim_step(queue, future, future.request)
            case UnloadRequest():
                return await self._unload(model)
            case SaveRequest() | RejectedRequest() | ImportRequest():
                raise AssertionError("a save is captured, the others are answered without the cell")

    async def _create(self, model: Model, request: CreateRequest, hello: Hello) -> Success:
        check_create(request, hello)
        assert model.adapter is not None
        assert model.seed is not None
        await self._make_room(hello)
        created = await self._link.execute(
            CreateModel(new_command_id(), model.model_id, model.adapter, model.seed, request.lr_schedule)
        )
        model.base_model = hello.base_model.name
        self._now_resident(model)
        return created

    async def _load(
        self, queue: ModelQueue, request: CreateFromCheckpointRequest | LoadRequest, hello: Hello
    ) -> Success:
        model = queue.model
        source = await find_loadable(
            self._catalog, model.tenant, request.path, request.load_optimizer, hello, model.adapter
        )
        with source.lease:
            if model.model_id not in self._residency:
                await self._make_room(hello)
            loaded = await self._link.execute(
                LoadState(new_command_id(), model.model_id, source.version, source.adapter, request.load_optimizer)
            )
        assert isinstance(loaded, StateLoaded)
        model.base_model, model.adapter = hello.base_model.name, source.adapter
        model.step, model.iteration = loaded.step, loaded.iteration
        queue.window.clear()
        self._now_resident(model)
        return loaded

    async def _forward_backward(self, model: Model, request: ForwardBackwardRequest) -> Success:
        self._residency.touch(model.model_id)
        return await self._link.execute(
            ForwardBackward(
                new_command_id(),
                model.model_id,
                request.data,
                request.loss,
                request.loss_config,
                request.forward_only,
            )
        )

    async def _optim_step(self, queue: ModelQueue, future: Future, request: OptimStepRequest) -> Success:
        model = queue.model
        self._residency.touch(model.model_id)
        if queue.window.is_partial_for(future):
            await self._link.execute(DiscardGradients(new_command_id(), model.model_id))
            queue.window.clear()
            raise CommandFailed(
                ErrorKind.PARTIAL_GRADIENTS,
                "a forward_backward of this step failed, so its gradient is incomplete: no step was made, and the "
                "accumulated gradient was dropped",
            )
        stepped = await self._link.execute(OptimStep(new_command_id(), model.model_id, request.adam, request.scheduled))
        assert isinstance(stepped, OptimStepDone)
        model.step, model.iteration = stepped.step, stepped.iteration
        queue.window.clear()
        return stepped

    async def capture(self, future: Future, request: SaveRequest) -> Publishing:
        """Have the model's state copied for a save; what follows in training does not reach it.

        Raises `CommandFailed` or `CellLost`.
        """
        hello = self._link.hello
        if hello is None:
            raise CellLost("the trainer cell was lost before the command was sent")
        self._residency.touch(future.model_id)
        saves = self._catalog.saves
        save = await saves.open(future, request, new_command_id())
        try:
            command = self._save_command(save, hello)
            flight = await self._link.capture(command, save.note_progress)
            if flight.answer.done():
                await flight.outcome()  # a failure before the capture is this call's
        except BaseException:
            saves.close(save)
            raise
        return Publishing(self._catalog, command, hello, flight, save)

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

    async def _unload(self, model: Model) -> Success:
        command = FreeModel(new_command_id(), model.model_id)
        try:
            freed = await self._link.execute(command)
        except CellLost:
            # Gone with its cell: that is what was asked for.
            freed = ModelFreed(command.command_id, was_resident=True)
        self._residency.leave(model.model_id)
        model.state, model.trouble = "unloaded", None
        return freed

    async def _make_room(self, hello: Hello) -> None:
        """Free a slot if none is free; raises `CommandFailed(NO_FREE_SLOT)` when nobody may give way."""
        while len(self._residency) >= hello.slots:
            victim = self._residency.first(self._may_give_way)
            if victim is None:
                raise CommandFailed(
                    ErrorKind.NO_FREE_SLOT,
                    f"all {hello.slots} slots are taken by models of open sessions; unload one or finish a session",
                )
            log.warning("model %s loses its slot to another: its session is over", victim)
            await self._link.execute(FreeModel(new_command_id(), victim))
            self._residency.leave(victim)
            self._on_evicted(victim)

    def _now_resident(self, model: Model) -> None:
        self._residency.touch(model.model_id)
        model.state, model.trouble = "ready", None
