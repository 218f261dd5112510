"""Every command a cell obeys, as frozen msgspec structs in one tagged union.

Arrays travel as raw little-endian bytes with dtype and shape, never as lists.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from trainer_cell.protocol.errors import CommandFailed, ErrorKind

PROTOCOL_VERSION = 3

DType = Literal["float32", "int64"]


class Array(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A dense C-ordered little-endian array; `len(data) == prod(shape) * itemsize(dtype)`."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes


class Datum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One training sequence.

    tokens: model input, int32 little-endian, shape [T].
    inputs: what the loss reads, by name; for `cross_entropy` `target_tokens` int64 [T] and `weights` float32 [T].
    """

    tokens: bytes
    inputs: dict[str, Array]


class AdapterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shape of a LoRA adapter; the scale of its product is `alpha / rank`."""

    rank: int
    alpha: float
    train_attn: bool
    train_mlp: bool
    train_unembed: bool


class AdamParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hyper-parameters of one AdamW step (decoupled decay); `grad_clip_norm == 0` means no clipping."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


class LrSchedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rates that follow the number of a model's steps, named as Megatron's `OptimizerParamScheduler` names them.

    The learning rate goes from init_lr to max_lr over lr_warmup_steps, then in lr_decay_style to min_lr, where it is
    after lr_decay_steps, the warm-up included. wsd_decay_steps, lr_wsd_decay_style: the last part of WSD.
    start_wd, end_wd, wd_incr_steps, wd_incr_style: the same for the weight decay; all None: it is not scheduled.
    """

    max_lr: float
    min_lr: float
    lr_warmup_steps: int
    lr_decay_steps: int
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
    init_lr: float = 0.0
    wsd_decay_steps: int | None = None
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] | None = None
    start_wd: float | None = None
    end_wd: float | None = None
    wd_incr_steps: int | None = None
    wd_incr_style: Literal["constant", "linear", "cosine"] | None = None


Rate = Literal["learning_rate", "weight_decay"]


class _Addressed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="command"):
    command_id: str
    model_id: str


class _Command(_Addressed, frozen=True, kw_only=True):
    """turn: the command's place among those of its model, from 0. deadline_s: one that takes longer ends the cell."""

    turn: int = 0
    deadline_s: float = 3600.0


class CreateModel(_Command, frozen=True, tag="create_model"):
    """Make a model resident with a fresh adapter: A from `seed` (the same under every layout), B zero."""

    adapter: AdapterSpec
    seed: int
    lr_schedule: LrSchedule | None = None


class FreeModel(_Command, frozen=True, tag="free_model"):
    """Give the model's slot away; succeeds also when the model is not resident."""


class ForwardBackward(_Command, frozen=True, tag="forward_backward"):
    """Losses and logprobs of `data`, in order; unless `forward_only`, the gradient of their sum is accumulated."""

    data: tuple[Datum, ...]
    loss: str
    loss_config: dict[str, float | str]
    forward_only: bool


class OptimStep(_Command, frozen=True, tag="optim_step"):
    """One AdamW step over the accumulated gradients, which are cleared.

    scheduled: what the model's schedule says instead of `adam`. For the learning rate the model must have a schedule;
    a weight decay that is not scheduled is that of `adam`.
    """

    adam: AdamParams
    scheduled: tuple[Rate, ...] = ()


class DiscardGradients(_Command, frozen=True, tag="discard_gradients"):
    """Clear the accumulated gradients and change nothing else."""


class ByteQuota(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes of checkpoints that a tenant has (those replaced, and saves under way, among them) and may have."""

    used: int
    limit: int

    def check(self, num_bytes: int) -> None:
        """Raises `CommandFailed` (QUOTA_EXCEEDED) when so many bytes of tensors do not fit; their description, which is
        small and not known before, is counted once it is there."""
        if self.used + num_bytes > self.limit:
            raise CommandFailed(
                ErrorKind.QUOTA_EXCEEDED,
                f"this checkpoint needs {num_bytes} bytes; {self.used} of the {self.limit} bytes allowed are used, "
                "replaced versions that still have their grace among them: delete checkpoints to make room",
            )


class SaveState(_Command, frozen=True, omit_defaults=True, tag="save_state"):
    """Publish a checkpoint of the model under `<root>/<model_id>/<kind>/<name>`.

    kind: a `recovery` snapshot is the gateway's own: it has no quota, and may hold NaN and infinity.
    include_optimizer: False leaves masters and moments out (the weights then carry the state alone); of a `recovery`
    snapshot it is obeyed whatever the flags of the cell say.
    created / expires: UTC, ISO 8601 with `Z`. quota: None where the tenant has none.
    """

    name: str
    kind: Literal["weights", "sampler_weights", "recovery"]
    overwrite: bool
    include_optimizer: bool
    tenant_digest: str
    created: str
    expires: str | None
    user_metadata: dict[str, str]
    quota: ByteQuota | None = None


class LoadState(_Command, frozen=True, tag="load_state"):
    """Put a published version into the model's slot.

    version: directory of the version, relative to the checkpoint root (the gateway has resolved the public link).
    adapter: shape of the checkpoint's adapter; a model that is not resident is made resident with it.
    obeys_flags: False for what only brings a model back: `load_optimizer` then holds also under --no-load-optim.
    """

    version: str
    adapter: AdapterSpec
    load_optimizer: bool
    obeys_flags: bool = True


class ForgetModels(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="command", tag="forget_models"):
    """Free every resident model that is not in `keep`: a new gateway does not know the others."""

    command_id: str
    keep: tuple[str, ...]


class Acknowledge(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="command", tag="acknowledge"):
    """The gateway has these outcomes for good: the cell need not remember them. It has no outcome of its own."""

    command_ids: tuple[str, ...]


class Tick(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="command", tag="tick"):
    """Keeps idle ranks inside their collective's timeout; rank 0 makes it, the gateway never sends it."""


class Stop(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="command", tag="stop"):
    """End the cell in good order: every rank leaves its loop."""


ModelCommand = CreateModel | FreeModel | ForwardBackward | OptimStep | DiscardGradients | SaveState | LoadState
Command = ModelCommand | ForgetModels | Acknowledge | Tick | Stop

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Command)


def encode_command(command: Command) -> bytes:
    return _encoder.encode(command)


def decode_command(frame: bytes) -> Command:
    """Raises `msgspec.ValidationError`, naming the field, for anything that is not a command."""
    return _decoder.decode(frame)
