"""forward_backward bodies in both directions."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable

from google.protobuf.message import DecodeError

from gateway.http import tinker_pb2 as pb
from gateway.http.wire import MAX_SEQ_ID
from gateway.scheduling.errors import InvalidRequest
from gateway.scheduling.requests import ForwardBackwardRequest
from trainer_cell.protocol.commands import Array, Datum, DType
from trainer_cell.protocol.outcomes import ForwardBackwardDone

TOKEN_BYTES = 4
LOGPROB_BYTES = 4
_MAX_NAME_CHARS = 64
_MAX_CONFIG_KEYS = 64
_DTYPES: dict[int, tuple[DType, int]] = {pb.DTYPE_FLOAT32: ("float32", 4), pb.DTYPE_INT64: ("int64", 8)}


def parse(raw: bytes) -> pb.ForwardBackwardRequest:
    """The message, with a model_id and a seq_id that can be used; raises `InvalidRequest`."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise InvalidRequest("the body is not a ForwardBackwardRequest") from error
    if not 1 <= len(message.model_id) <= 256:
        raise InvalidRequest("model_id: missing or too long")
    if not 1 <= message.seq_id <= MAX_SEQ_ID:
        raise InvalidRequest("seq_id: must be 1 or more")
    return message


def forward_backward_of(message: pb.ForwardBackwardRequest) -> ForwardBackwardRequest:
    """The request; raises `InvalidRequest` for what no cell could read. Whether values make sense is the cell's."""
    if not message.data:
        raise InvalidRequest("data: no datum")
    if not 1 <= len(message.loss_fn) <= _MAX_NAME_CHARS:
        raise InvalidRequest("loss_fn: missing or too long")
    return ForwardBackwardRequest(
        data=tuple(_datum(index, datum) for index, datum in enumerate(message.data)),
        loss=message.loss_fn,
        loss_config=_loss_config(message),
        forward_only=message.forward_only,
    )


def _loss_config(message: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        match value.WhichOneof("value"):
            case "number":
                config[key] = value.number
            case "text":
                config[key] = value.text
            case _:
                raise InvalidRequest(f"loss_fn_config.{key[:_MAX_NAME_CHARS]}: no value")
    if len(config) > _MAX_CONFIG_KEYS:
        raise InvalidRequest(f"loss_fn_config: over {_MAX_CONFIG_KEYS} keys")
    for key, number in config.items():
        if isinstance(number, float) and not math.isfinite(number):
            raise InvalidRequest(f"loss_fn_config.{key[:_MAX_NAME_CHARS]}: not a finite number")
    return config


def _datum(index: int, datum: pb.Datum) -> Datum:
    where = f"data[{index}]"
    tokens = b"".join(_tokens(where, chunk) for chunk in datum.model_input)
    if not tokens:
        raise InvalidRequest(f"{where}.model_input: no tokens")
    inputs = {
        name: _array(f"{where}.loss_fn_inputs.{name[:_MAX_NAME_CHARS]}", tensor)
        for name, tensor in datum.loss_fn_inputs.items()
    }
    return Datum(tokens=tokens, inputs=inputs)


def _tokens(where: str, chunk: pb.Chunk) -> bytes:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        raise InvalidRequest(f"{where}.model_input: {kind or 'empty'} chunks are not supported, only encoded_text")
    tokens: bytes = chunk.encoded_text.tokens
    if len(tokens) % TOKEN_BYTES != 0:
        raise InvalidRequest(f"{where}.model_input: tokens are int32, {len(tokens)} bytes are no whole number of them")
    return tokens


def _array(where: str, tensor: pb.Tensor) -> Array:
    if tensor.WhichOneof("encoding") == "sparse_csr":
        raise InvalidRequest(f"{where}: sparse tensors are not supported")
    if tensor.dtype not in _DTYPES:
        raise InvalidRequest(f"{where}: dtype must be float32 or int64")
    dtype, item_bytes = _DTYPES[tensor.dtype]
    if len(tensor.dense) % item_bytes != 0:
        raise InvalidRequest(f"{where}: {len(tensor.dense)} bytes are no whole number of {dtype} values")
    length = len(tensor.dense) // item_bytes
    # A tensor without a shape is one-dimensional.
    shape = tuple(tensor.shape) or (length,)
    if len(shape) != 1:
        raise InvalidRequest(f"{where}: has {len(shape)} dimensions, only one-dimensional tensors are supported")
    if shape[0] != length:
        raise InvalidRequest(f"{where}: shape says {shape[0]} values, there are {length}")
    return Array(dtype=dtype, shape=shape, data=tensor.dense)


def encode_result(done: ForwardBackwardDone) -> bytes:
    """A serialised ForwardBackwardOutput with the logprobs of each datum. NaN and infinities pass as they are."""
    output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=done.metrics)
    record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(done.logprobs))
    logprobs = record.fields["logprobs"]
    logprobs.data = b"".join(done.logprobs)
    logprobs.offsets = _offsets(len(one) for one in done.logprobs)
    logprobs.dtype = pb.DTYPE_FLOAT32
    encoded: bytes = output.SerializeToString()
    return encoded


def _offsets(lengths: Iterable[int]) -> bytes:
    """Where each piece begins and the last one ends, in bytes: int64, little-endian."""
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return struct.pack(f"<{len(offsets)}q", *offsets)


def floats(logprobs: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(logprobs) // LOGPROB_BYTES}f", logprobs))
