"""Sessions, models and futures as the journal keeps them, and back."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from gateway.scheduling.futures import Future
from gateway.scheduling.identity import command_id_of
from gateway.scheduling.model_queue import ModelQueue
from gateway.scheduling.models import Model, ModelState
from gateway.scheduling.requests import ForwardBackwardRequest, RejectedRequest, Request, operation_of
from gateway.scheduling.sessions import Session
from gateway.scheduling.steady_clock import steady_time
from gateway.store.records import CommandRecord, ModelRecord, SessionRecord
from trainer_cell.protocol.commands import AdapterSpec, Datum, LrSchedule
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import Failed, Success

_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(Request).decode
_decode_data = msgspec.msgpack.Decoder(tuple[Datum, ...]).decode
_decode_outcome = msgspec.msgpack.Decoder(Success | Failed).decode


class _Facts(msgspec.Struct, frozen=True):
    """What a model is apart from its commands; `Model` tells what each is."""

    base_model: str | None
    base_digest: str | None
    adapter: AdapterSpec | None
    seed: int | None
    lr_schedule: LrSchedule | None
    user_metadata: dict[str, str]
    state: ModelState
    trouble: Failed | None
    step: int
    iteration: int


_decode_facts = msgspec.msgpack.Decoder(_Facts).decode


def session_record(session: Session) -> SessionRecord:
    return SessionRecord(
        session_id=session.session_id,
        tenant=session.tenant,
        tags=session.tags,
        user_metadata=session.user_metadata,
        sdk_version=session.sdk_version,
        project_id=session.project_id,
        display_name=session.display_name,
        beats=session.beats,
        created=session.created.isoformat(),
        finish_reason=session.finish_reason,
        finish_detail=session.finish_detail,
        last_sign=steady_time(),
    )


def session_of(record: SessionRecord, now_s: float) -> Session:
    """now_s: monotonic. Its client is given the whole of its time again: it could not reach us meanwhile."""
    return Session(
        session_id=record.session_id,
        tenant=record.tenant,
        tags=tuple(record.tags),
        user_metadata=record.user_metadata,
        sdk_version=record.sdk_version,
        project_id=record.project_id,
        display_name=record.display_name,
        last_sign_s=now_s,
        beats=record.beats,
        created=datetime.fromisoformat(record.created),
        finish_reason=record.finish_reason,  # type: ignore[arg-type]  # one of them was written
        finish_detail=record.finish_detail,
    )


def model_record(queue: ModelQueue) -> ModelRecord:
    model, snapshot = queue.model, queue.history.snapshot
    trouble = None if model.trouble is None else failed("", model.trouble)
    facts = _Facts(
        model.base_model,
        model.base_digest,
        model.adapter,
        model.seed,
        model.lr_schedule,
        model.user_metadata,
        # What a cell could not bring back another may: that is for the next process to find out.
        "ready" if model.state == "lost" else model.state,
        None if model.state == "lost" else trouble,
        model.step,
        model.iteration,
    )
    return ModelRecord(
        model_id=model.model_id,
        session_id=model.session_id,
        tenant=model.tenant,
        number=model.number,
        created=model.created.isoformat(),
        last_request=model.last_request_time.isoformat(),
        facts=_encode(facts),
        snapshot=None if snapshot is None else snapshot.version,
        snapshot_turn=-1 if snapshot is None else snapshot.turn,
    )


def import_record(future: Future) -> ModelRecord:
    """Of an import under an id of its own: no model, but what the journal keeps its commands by."""
    now = datetime.fromtimestamp(steady_time(), UTC).isoformat()
    return ModelRecord(
        model_id=future.model_id,
        session_id="",
        tenant=future.tenant,
        number=-1,
        created=now,
        last_request=now,
        facts=b"",
        is_over=True,
    )


def is_of_import(record: ModelRecord) -> bool:
    return record.number < 0


def model_of(record: ModelRecord) -> Model:
    facts = _decode_facts(record.facts)
    return Model(
        model_id=record.model_id,
        session_id=record.session_id,
        tenant=record.tenant,
        base_model=facts.base_model,
        base_digest=facts.base_digest,
        adapter=facts.adapter,
        seed=facts.seed,
        user_metadata=facts.user_metadata,
        lr_schedule=facts.lr_schedule,
        number=record.number,
        state=facts.state,
        trouble=None if facts.trouble is None else facts.trouble.as_error(),
        step=facts.step,
        iteration=facts.iteration,
        created=datetime.fromisoformat(record.created).astimezone(UTC),
        last_request_time=datetime.fromisoformat(record.last_request).astimezone(UTC),
    )


def command_record(
    future: Future, seq_id: int | None, fingerprint: bytes, key: str | None, key_digest: bytes | None
) -> CommandRecord:
    """Of a new one."""
    request, payload = future.request, None
    if isinstance(request, ForwardBackwardRequest):
        request, payload = msgspec.structs.replace(request, data=()), _encode(request.data)
    return CommandRecord(
        request_id=future.request_id,
        model_id=future.model_id,
        tenant=future.tenant,
        moment=future.accepted_moment,
        seq_id=seq_id,
        key=key,
        key_digest=key_digest,
        fingerprint=fingerprint,
        operation=future.operation,
        request=_encode(request),
        payload=payload,
        payload_bytes=future.payload_bytes,
        accepted=steady_time(),
        attempts=0,
        turn=None,
        version=None,
        outcome=None,
        finished=None,
        told_moment=None,
        told=None,
    )


def future_of(record: CommandRecord) -> Future:
    """As it was; the arrays are in its request where the record has them."""
    request: Request = _decode_request(record.request)
    if record.payload is not None and isinstance(request, ForwardBackwardRequest):
        request = msgspec.structs.replace(request, data=data_of(record.payload))
    elif record.payload_bytes and record.finished is None:
        reason = "the stored data of this request have changed on the disk"
        request = RejectedRequest(record.operation, ErrorKind.STORAGE_FAILED, reason)
    future = Future(record.tenant, record.model_id, operation_of(request), request, record.moment, record.request_id)
    future.payload_bytes = record.payload_bytes
    future.attempts, future.turn, future.version = record.attempts, record.turn, record.version
    future.told_moment = record.told_moment
    future.accept()
    if record.outcome is not None:
        future.finish(outcome_of(record.outcome))
    return future


def data_of(payload: bytes) -> tuple[Datum, ...]:
    return _decode_data(payload)


def packed_outcome(future: Future, answer: Success | CommandFailed) -> bytes:
    if isinstance(answer, CommandFailed):
        return _encode(failed(command_id_of(future.request_id), answer))
    return _encode(answer)


def outcome_of(packed: bytes) -> Success | CommandFailed:
    outcome = _decode_outcome(packed)
    return outcome.as_error() if isinstance(outcome, Failed) else outcome


def failed(command_id: str, error: CommandFailed) -> Failed:
    return Failed(command_id, error.kind, error.message)
