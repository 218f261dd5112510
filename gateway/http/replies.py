"""The JSON bodies /api/v1 answers with, as the SDK expects them. A result of a future is made in `results`."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel


class Accepted(BaseModel):
    """The handle of a future, to be given to retrieve_future."""

    request_id: str
    model_id: str


class SessionCreated(BaseModel):
    session_id: str
    type: Literal["create_session"] = "create_session"
    warning_message: str | None = None


class ClientConfig(BaseModel):
    """Flags the SDK follows; those left out keep the SDK's defaults.

    create_model_via_load_weights: SDK 0.25 then resumes with one load_weights, as 0.38 always does.
    """

    create_model_via_load_weights: Literal[True] = True
    fwdbwd_max_chunk_bytes_count: int


class DynamicConfig(BaseModel):
    refresh_interval_sec: int = 300


class TelemetryAccepted(BaseModel):
    status: Literal["accepted"] = "accepted"


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class SupportedModel(BaseModel):
    model_name: str
    max_context_length: int
    trainable: bool = True
    sampleable: bool = False


class ServerCapabilities(BaseModel):
    supported_models: list[SupportedModel]


class ModelData(BaseModel):
    model_name: str | None
    tokenizer_id: str | None = None


class AdamOptimizer(BaseModel):
    type: Literal["adamw"] = "adamw"


class ModelInfo(BaseModel):
    model_id: str
    model_data: ModelData
    optimizer_config: AdamOptimizer = AdamOptimizer()
    is_lora: Literal[True] = True
    lora_rank: int | None
    model_name: str | None
    type: Literal["get_info"] = "get_info"


class WeightsInfo(BaseModel):
    base_model: str
    is_lora: Literal[True] = True
    lora_rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool
    optimizer_config: AdamOptimizer = AdamOptimizer()


class Checkpoint(BaseModel):
    """checkpoint_id: with its kind, as in `weights/0001`."""

    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler"]
    time: datetime
    tinker_path: str
    size_bytes: int
    public: Literal[False] = False
    user_metadata: dict[str, str]
    expires_at: datetime | None


class Cursor(BaseModel):
    offset: int
    limit: int
    total_count: int


class Checkpoints(BaseModel):
    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class TrainingRun(BaseModel):
    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: Literal[True] = True
    corrupted: bool = False
    lora_rank: int | None
    last_request_time: datetime
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str]


class TrainingRuns(BaseModel):
    training_runs: list[TrainingRun]
    cursor: Cursor


class Sessions(BaseModel):
    sessions: list[str]


class SessionInfo(BaseModel):
    training_run_ids: list[str]
    sampler_ids: list[str] = []
    user_metadata: dict[str, Any]
    display_name: str | None
