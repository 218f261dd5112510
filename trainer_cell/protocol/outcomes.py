"""Everything a cell says: its hello, the outcome of each command, and progress in between."""

from __future__ import annotations

from typing import Literal

import msgspec

from trainer_cell.protocol.commands import AdapterSpec
from trainer_cell.protocol.errors import CommandFailed, ErrorKind


class BaseModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The frozen model of a cell.

    name: the wire name, in hub form; aliases: other names requests may use.
    digest: xxh3-128 over names, dtypes, shapes and bytes of the base weights (hex).
    source: what a client may load the tokenizer from (a hub id or a directory), None if there is none.
    max_context: longest sequence, in tokens.
    """

    name: str
    aliases: tuple[str, ...]
    digest: str
    source: str | None
    vocab_size: int
    max_context: int


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parallel sizes; `world == tensor * pipeline * data`."""

    world: int
    tensor: int
    pipeline: int
    data: int


class ResidentModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """turn: of the last command that changed the slot."""

    model_id: str
    adapter: AdapterSpec
    step: int
    iteration: int
    turn: int = 0


class _Said(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="said"):
    pass


class Progress(_Said, frozen=True, tag="progress"):
    """Where a save is, while it runs: bytes of bytes."""

    command_id: str
    phase: Literal["capturing", "writing", "publishing"]
    bytes_done: int
    bytes_total: int


class _Outcome(_Said, frozen=True):
    command_id: str


class ModelCreated(_Outcome, frozen=True, tag="model_created"):
    num_parameters: int


class ModelFreed(_Outcome, frozen=True, tag="model_freed"):
    was_resident: bool


class ForwardBackwardDone(_Outcome, frozen=True, tag="forward_backward_done"):
    """logprobs: one per datum, in order: float32 little-endian bytes, shape as the datum's `target_tokens`."""

    logprobs: tuple[bytes, ...]
    metrics: dict[str, float]


class OptimStepDone(_Outcome, frozen=True, tag="optim_step_done"):
    """step: Adam's step after this one; iteration: optimizer steps in the model's life, loads included."""

    step: int
    iteration: int
    metrics: dict[str, float]


class GradientsDiscarded(_Outcome, frozen=True, tag="gradients_discarded"):
    pass


class StateSaved(_Outcome, frozen=True, tag="state_saved"):
    """version: the published directory, relative to the checkpoint root."""

    version: str
    step: int
    iteration: int
    has_optimizer: bool
    size_bytes: int


class StateLoaded(_Outcome, frozen=True, tag="state_loaded"):
    """What was restored. `reason` says why the optimizer was not: `not_requested`, `no_load_optim` or None."""

    step: int
    iteration: int
    optimizer_restored: bool
    scheduler_restored: bool
    reason: Literal["not_requested", "no_load_optim"] | None


class ModelsForgotten(_Outcome, frozen=True, tag="models_forgotten"):
    num_freed: int


class Failed(_Outcome, frozen=True, tag="failed"):
    kind: ErrorKind
    message: str

    def as_error(self) -> CommandFailed:
        return CommandFailed(self.kind, self.message)


Success = (
    ModelCreated
    | ModelFreed
    | ForwardBackwardDone
    | OptimStepDone
    | GradientsDiscarded
    | StateSaved
    | StateLoaded
    | ModelsForgotten
)
Outcome = Success | Failed


class Hello(_Said, frozen=True, tag="hello"):
    """First frame of a connection. `epoch` names one life of the cell.

    outcomes: all that are not acknowledged, in the order in which they were said. publishing: command ids of the saves
    that are captured and not answered yet.
    """

    protocol_version: int
    epoch: str
    layout: Layout
    base_model: BaseModel
    dtype: Literal["fp32", "bf16"]
    deterministic: bool
    no_load_optim: bool
    no_save_optim: bool
    slots: int
    max_lora_rank: int
    models: tuple[ResidentModel, ...]
    outcomes: tuple[Outcome, ...] = ()
    publishing: tuple[str, ...] = ()


Said = Hello | Progress | Outcome

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Said)


def encode_said(said: Said) -> bytes:
    return _encoder.encode(said)


def decode_said(frame: bytes) -> Said:
    """Raises `msgspec.ValidationError`, naming the field, for anything a cell cannot say."""
    return _decoder.decode(frame)
