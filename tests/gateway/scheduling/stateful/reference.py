"""What must have become of a model, told by running its accepted commands one after the other over one number."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from gateway.scheduling.admission import adapter_of
from gateway.scheduling.execution import MOST_LOSSES
from gateway.scheduling.identity import command_id_of
from gateway.scheduling.requests import (
    CreateRequest,
    ForwardBackwardRequest,
    LoadRequest,
    OptimStepRequest,
    RejectedRequest,
    Request,
    SaveRequest,
    UnloadRequest,
    adds_gradient,
)
from gateway.scheduling.turns import MOST_ATTEMPTS
from gateway.store.records import CommandRecord
from tests.fakes.fake_model import FakeModel
from tests.gateway.scheduling.stateful.clients import ClientsModel, Sent
from tests.gateway.scheduling.stateful.world import World
from trainer_cell.protocol.commands import ForwardBackward, OptimStep
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import (
    ForwardBackwardDone,
    ModelCreated,
    ModelFreed,
    OptimStepDone,
    StateLoaded,
    StateSaved,
    Success,
)
from trainer_cell.vault.layout import CheckpointAddress


class Reference:
    """rows: of the model in the journal. not_made: why its creation failed, and all that was asked of it after that."""

    def __init__(self, client: ClientsModel, rows: Mapping[str, CommandRecord], world: World) -> None:
        self.model: FakeModel | None = None
        self.saved: dict[str, tuple[FakeModel, str]] = {}
        self.is_over = False
        self.not_made: ErrorKind | None = None
        self._world = world
        self._window: list[Sent | None] = []
        by_id = {sent.request_id: sent for sent in client.all}
        in_order = sorted(rows.values(), key=lambda row: -1 if row.turn is None else row.turn)
        turns = [row.turn for row in in_order]
        assert turns == list(range(len(turns))), f"turns {turns}"
        last = -1
        for row in in_order:
            if row.seq_id is not None and not (self.is_over or self.not_made):
                # Of a model that is over, or was never made, every command fails as soon as it comes.
                assert row.seq_id > last, f"{row.seq_id} was not run in order: after {last}"
                last = row.seq_id
            self._run(row, by_id.get(row.request_id))

    def _run(self, row: CommandRecord, sent: Sent | None) -> None:
        if sent is None:
            # A number that nobody sent under was sealed.
            self._window.append(None)
            return
        assert sent.told is not None
        expected = self._expected(sent.request, sent, command_id_of(row.request_id))
        _check(sent, expected)
        if isinstance(sent.told, CommandFailed):
            self._note_failure(sent, sent.told)

    def _note_failure(self, sent: Sent, told: CommandFailed) -> None:
        if isinstance(sent.request, CreateRequest):
            self.not_made = told.kind
        if adds_gradient(sent.request) and not self.is_over:
            self._window.append(sent)
        if told.kind is ErrorKind.PARTIAL_GRADIENTS:
            self._window.clear()
            assert self.model is not None
            self.model.pending = 0.0

    def _expected(self, request: Request, sent: Sent, command_id: str) -> Success | ErrorKind:
        told = sent.told
        if isinstance(request, RejectedRequest):
            return request.kind
        if self.not_made is not None:
            return self.not_made
        if isinstance(told, CommandFailed):
            if told.kind in (ErrorKind.CELL_LOST, ErrorKind.MODEL_LOST):
                self._check_given_up(sent, told)
                return told.kind
            if told.kind is ErrorKind.RANK_FAILED and self._world.has_failed(command_id):
                return ErrorKind.RANK_FAILED
        if self.is_over:
            return ErrorKind.UNKNOWN_MODEL
        try:
            return self._done(request, sent, command_id)
        except CommandFailed as failure:
            return failure.kind

    def _check_given_up(self, sent: Sent, told: CommandFailed) -> None:
        """A command that ended cells, or whose model no cell could hold."""
        assert sent.request_id is not None
        losses, living = self._world.losses, self._world.living
        if told.kind is ErrorKind.CELL_LOST:
            num_lost, most = losses.of_command(sent.request_id, living), MOST_ATTEMPTS
        else:
            num_lost, most = losses.of_model(sent.model.model_id, living), MOST_LOSSES
        assert num_lost >= most, f"{told!r} after {num_lost} losses"

    def _done(self, request: Request, sent: Sent, command_id: str) -> Success:
        if isinstance(request, CreateRequest):
            assert request.seed is not None
            self.model = FakeModel.fresh(adapter_of(request), request.seed)
            return ModelCreated(command_id, request.rank)
        model = self.model
        assert model is not None
        match request:
            case ForwardBackwardRequest():
                only = request.forward_only
                return model.forward_backward(
                    ForwardBackward(command_id, "", request.data, request.loss, request.loss_config, only), 512
                )
            case OptimStepRequest():
                return self._optim_step(model, request, sent, command_id)
            case SaveRequest():
                return self._save(model, request, sent, command_id)
            case LoadRequest():
                return self._load(request, command_id)
            case UnloadRequest():
                self.is_over = True
                return ModelFreed(command_id, True)
        raise AssertionError(request)

    def _optim_step(self, model: FakeModel, request: OptimStepRequest, sent: Sent, command_id: str) -> Success:
        # Of a request that had to be sent again the moment of acceptance is not known: either answer may be right.
        was_partial = isinstance(sent.told, CommandFailed) and sent.told.kind is ErrorKind.PARTIAL_GRADIENTS
        must_be = self._is_partial(sent.sent_at[-1])
        # Nor is it on record at once that a client was told: a gateway that follows one that was killed before that
        # errs on the safe side. That it is on record soon is for `check.check_tellings`.
        may_be = self._is_partial(sent.sent_at[0]) or any(
            failed is not None and self._was_forgotten(failed, sent) for failed in self._window
        )
        assert not must_be or was_partial, "a step on a partial gradient"
        if was_partial:
            assert may_be, "a step was refused although its client knew what it did"
            raise CommandFailed(ErrorKind.PARTIAL_GRADIENTS, "")
        done = model.optim_step(OptimStep(command_id, "", request.adam))
        self._window.clear()
        return done

    def _was_forgotten(self, failed: Sent, sent: Sent) -> bool:
        """Whether a gateway that may have accepted the one did not know that the failure of the other was told."""
        assert failed.request_id is not None
        return self._world.tellings.was_forgotten(failed.request_id, failed.told_in, sent.sent_in)

    def _is_partial(self, accepted_at: int) -> bool:
        return any(failed is None or failed.told_at is None or failed.told_at > accepted_at for failed in self._window)

    def _save(self, model: FakeModel, request: SaveRequest, sent: Sent, command_id: str) -> Success:
        if request.name in self.saved and not request.overwrite:
            raise CommandFailed(ErrorKind.CHECKPOINT_EXISTS, "")
        version = sent.told.version if isinstance(sent.told, StateSaved) else ""
        self.saved[request.name] = (copy.copy(model), version)
        return StateSaved(command_id, version, model.step, model.iteration, True, 0)

    def _load(self, request: LoadRequest, command_id: str) -> Success:
        name = CheckpointAddress.parse(request.path).name
        if name not in self.saved:
            raise CommandFailed(ErrorKind.CHECKPOINT_NOT_FOUND, "")
        loaded = copy.copy(self.saved[name][0])
        loaded.pending = 0.0
        if not request.load_optimizer:
            loaded.momentum, loaded.step = 0.0, 0
        self.model = loaded
        self._window.clear()
        return StateLoaded(command_id, loaded.step, loaded.iteration, request.load_optimizer, False, None)


def _check(sent: Sent, expected: Success | ErrorKind) -> None:
    told = sent.told
    what = f"{type(sent.request).__name__} {sent.seq_id} was told {told!r} instead of {expected!r}"
    if isinstance(expected, ErrorKind):
        assert isinstance(told, CommandFailed), what
        assert told.kind is expected, what
        return
    assert type(told) is type(expected), what
    assert isinstance(told, Success)
    match told:
        case ForwardBackwardDone() | OptimStepDone():
            assert told == expected, what
        case StateSaved() | StateLoaded():
            assert isinstance(expected, StateSaved | StateLoaded)
            assert (told.step, told.iteration) == (expected.step, expected.iteration), what
