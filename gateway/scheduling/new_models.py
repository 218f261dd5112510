"""What a model is before it is made: as much of it as its request tells, and a seed if it names none."""

from __future__ import annotations

import secrets

from gateway.scheduling.admission import adapter_of
from gateway.scheduling.models import Model
from gateway.scheduling.requests import CreateFromCheckpointRequest, CreateRequest, Request
from gateway.scheduling.sessions import Session


def model_to_be(session: Session, model_id: str, request: Request) -> Model:
    model = Model(model_id, session.session_id, session.tenant, None, None, None, {})
    match request:
        case CreateRequest():
            model.base_model = request.base_model
            model.adapter = adapter_of(request)
            model.seed = request.seed if request.seed is not None else secrets.randbits(32)
            model.lr_schedule = request.lr_schedule
            model.user_metadata = request.user_metadata
        case CreateFromCheckpointRequest():
            model.user_metadata = request.user_metadata
    return model
