"""The JSON bodies the SDK sends to /api/v1. `gateway.http.bodies` says how they are read."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints

from gateway.http.bodies import Body

MAX_SEQ_ID = 2**31 - 1
MIN_TTL_S = 3600
MAX_TTL_S = 10 * 366 * 86400
_MAX_METADATA_CHARS = 16_384
# Below this Adam's denominator could be zero in FP32.
_MIN_EPS = 1e-30
_MAX_RATE = 1e6

Text = Annotated[str, StringConstraints(max_length=1024)]
Id = Annotated[str, StringConstraints(min_length=1, max_length=256)]
SeqId = Annotated[int, Field(ge=1, le=MAX_SEQ_ID)]
ModelSeqId = Annotated[int, Field(ge=0, le=MAX_SEQ_ID)]
Rate = Annotated[float, Field(ge=0, le=_MAX_RATE, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Eps = Annotated[float, Field(ge=_MIN_EPS, le=_MAX_RATE, allow_inf_nan=False)]
Norm = Annotated[float, Field(ge=0, allow_inf_nan=False)]
TtlSeconds = Annotated[int, Field(ge=MIN_TTL_S, le=MAX_TTL_S, description="One hour to ten years.")]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


def _small(metadata: dict[str, Any]) -> dict[str, Any]:
    if sum(len(key) + len(_as_text(value)) for key, value in metadata.items()) > _MAX_METADATA_CHARS:
        raise ValueError(f"over {_MAX_METADATA_CHARS} characters")
    return metadata


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


TextMetadata = Annotated[dict[str, str], AfterValidator(_small)]
AnyMetadata = Annotated[dict[str, Any], AfterValidator(_small)]


def as_texts(metadata: dict[str, Any] | None) -> dict[str, str]:
    """Metadata as training runs show it: what is not a string appears as its JSON."""
    return {key: _as_text(value) for key, value in (metadata or {}).items()}


class ModelTurn(Body):
    """What says whose turn a request is; a fault in the rest of it is then the future's, and spends the number."""

    model_id: Id
    seq_id: SeqId


class SessionTurn(Body):
    """The same for a request that makes a model."""

    session_id: Id
    model_seq_id: ModelSeqId


class ModelBody(Body):
    model_id: Id


class SessionBody(Body):
    session_id: Id


class CreateSession(Body):
    tags: list[Text] = Field(default=[], max_length=256)
    user_metadata: AnyMetadata | None = None
    sdk_version: Text | None = None
    project_id: Text | None = None
    display_name: Text | None = None


class FinishReason(Body):
    type: Literal["success", "errored", "interrupted"]


class FinishSession(Body):
    reason: FinishReason
    detail: Annotated[str, StringConstraints(max_length=65_536)] | None = None


class LoraConfig(Body):
    rank: int = Field(ge=1, le=65_536)
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Body):
    type: Text = "adamw"


class CreateModel(SessionTurn):
    base_model: Id
    lora_config: LoraConfig
    user_metadata: AnyMetadata | None = None
    optimizer_config: OptimizerConfig | None = None


class AdamParams(Body):
    learning_rate: Rate = 1e-4
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    eps: Eps = 1e-12
    weight_decay: Rate = 0.0
    grad_clip_norm: Norm = 0.0


class OptimStep(ModelTurn):
    adam_params: AdamParams | None = None
    optimizer_params: OptimizerConfig | None = None


class SaveWeights(ModelTurn):
    path: str
    ttl_seconds: TtlSeconds | None = None
    overwrite: bool = False
    user_metadata: TextMetadata | None = None


class LoadAddressing(Body):
    """Which of the two ways a load_weights is addressed."""

    model_id: Any = None
    seq_id: Any = None
    session_id: Any = None
    model_seq_id: Any = None

    @property
    def is_in_place(self) -> bool:
        return self.model_id is not None or self.seq_id is not None

    @property
    def makes_model(self) -> bool:
        return self.session_id is not None or self.model_seq_id is not None


class LoadWeights(Body):
    """What both addressings share. `optimizer` has no default: it must never be guessed."""

    path: Text
    optimizer: bool
    base_model: Id | None = None
    user_metadata: AnyMetadata | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None


class LoadWeightsInPlace(LoadWeights, ModelTurn):
    pass


class LoadWeightsAsModel(LoadWeights, SessionTurn):
    pass


class WeightsInfoOf(Body):
    tinker_path: Text


class RetrieveFuture(Body):
    request_id: Id
