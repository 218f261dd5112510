"""forward_backward bodies, against the SDK's own encoder and decoder."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import numpy as np
import pytest
from google.protobuf import descriptor_pb2
from tinker import types
from tinker.proto import tinker_public_pb2
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output

from gateway.http import tinker_pb2 as pb
from gateway.http.protobuf import encode_result, floats, forward_backward_of, parse
from gateway.scheduling.errors import InvalidRequest
from openapi.generate import compiled_descriptor, is_stale
from trainer_cell.protocol.outcomes import ForwardBackwardDone


def sdk_message(data: list[types.Datum], **others: object) -> bytes:
    asked = types.ForwardBackwardInput(data=data, loss_fn="cross_entropy", **others)  # type: ignore[arg-type]
    request = types.ForwardBackwardRequest(forward_backward_input=asked, model_id="s:train:0", seq_id=3)
    return bytes(forward_backward_request_to_proto(request).SerializeToString())


def sdk_datum(length: int) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(range(length))),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.arange(1, length + 1, dtype=np.int64)),
            "weights": types.TensorData.from_numpy(np.linspace(0, 1, length, dtype=np.float32)),
        },
    )


def message(change: Callable[[pb.ForwardBackwardRequest], None] = lambda message: None) -> pb.ForwardBackwardRequest:
    """A good one, changed."""
    made = pb.ForwardBackwardRequest(model_id="s:train:0", seq_id=1, loss_fn="cross_entropy")
    datum = made.data.add()
    datum.model_input.add().encoded_text.tokens = struct.pack("<3i", 1, 2, 3)
    target = datum.loss_fn_inputs["target_tokens"]
    target.dense, target.dtype = struct.pack("<3q", 2, 3, 4), pb.DTYPE_INT64
    target.shape.append(3)
    change(made)
    return made


def test_what_the_sdk_sends_is_read_as_it_was_meant() -> None:
    raw = sdk_message([sdk_datum(3), sdk_datum(5)], loss_fn_config={"clip": 0.5, "mode": "soft"})
    read = parse(raw)
    request = forward_backward_of(read)
    assert (read.model_id, read.seq_id, request.loss, request.forward_only) == (
        "s:train:0",
        3,
        "cross_entropy",
        False,
    )
    assert request.loss_config == {"clip": 0.5, "mode": "soft"}
    assert [len(datum.tokens) // 4 for datum in request.data] == [3, 5]
    assert request.data[1].tokens == np.arange(5, dtype=np.int32).tobytes()
    target = request.data[1].inputs["target_tokens"]
    assert (target.dtype, target.shape, target.data) == ("int64", (5,), np.arange(1, 6, dtype=np.int64).tobytes())
    assert request.data[0].inputs["weights"].data == np.linspace(0, 1, 3, dtype=np.float32).tobytes()


def test_the_tokens_of_several_chunks_are_one_input() -> None:
    datum = types.Datum(
        model_input=types.ModelInput(
            chunks=[types.EncodedTextChunk(tokens=[1, 2]), types.EncodedTextChunk(tokens=[3])]
        ),
        loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.array([2, 3, 4]))},
    )
    request = forward_backward_of(parse(sdk_message([datum])))
    assert request.data[0].tokens == np.array([1, 2, 3], dtype=np.int32).tobytes()


def test_the_sdk_reads_a_result_with_nan_and_ragged_datums() -> None:
    logprobs = (np.array([-1.5, math.nan, -math.inf], dtype=np.float32), np.array([-0.25], dtype=np.float32))
    done = ForwardBackwardDone("c", tuple(one.tobytes() for one in logprobs), {"loss:sum": math.nan, "a:mean": 2.0})
    output = deserialize_forward_backward_output(encode_result(done))
    assert output.loss_fn_output_type == "ArrayRecord"
    assert [list(one) for one in output.loss_fn_outputs] == [["logprobs"], ["logprobs"]]
    for told, expected in zip(output.loss_fn_outputs, logprobs, strict=True):
        np.testing.assert_array_equal(told["logprobs"].to_numpy(), expected)
        assert told["logprobs"].dtype == "float32"
    assert math.isnan(output.metrics["loss:sum"])
    assert output.metrics["a:mean"] == 2.0


def test_a_result_says_how_many_datums_it_has_and_where_each_begins_in_bytes() -> None:
    done = ForwardBackwardDone("c", (b"\0" * 12, b"", b"\0" * 4), {})
    record = pb.ForwardBackwardOutput.FromString(encode_result(done)).loss_fn_outputs[0]
    assert record.num_datums == 3
    assert struct.unpack("<4q", record.fields["logprobs"].offsets) == (0, 12, 12, 16)


def test_logprobs_are_read_back_as_floats() -> None:
    assert floats(struct.pack("<2f", -0.5, 1.0)) == [-0.5, 1.0]


def _image(message: pb.ForwardBackwardRequest) -> None:
    message.data[0].model_input.add().image.format = "png"


def _dmel(message: pb.ForwardBackwardRequest) -> None:
    message.data[0].model_input.add().dmel.dmel = b"x"


def _sparse(message: pb.ForwardBackwardRequest) -> None:
    message.data[0].loss_fn_inputs["target_tokens"].sparse_csr.values = b""


def _two_dimensions(message: pb.ForwardBackwardRequest) -> None:
    message.data[0].loss_fn_inputs["target_tokens"].shape[:] = [3, 1]


def _other_length(message: pb.ForwardBackwardRequest) -> None:
    message.data[0].loss_fn_inputs["target_tokens"].shape[:] = [4]


def _negative_length(message: pb.ForwardBackwardRequest) -> None:
    message.data[0].loss_fn_inputs["target_tokens"].shape[:] = [-3]


def _half_a_value(message: pb.ForwardBackwardRequest) -> None:
    message.data[0].loss_fn_inputs["target_tokens"].dense = b"12345"


def _half_a_token(message: pb.ForwardBackwardRequest) -> None:
    message.data[0].model_input[0].encoded_text.tokens = b"12345"


def _dtype(value: int) -> Callable[[pb.ForwardBackwardRequest], None]:
    def change(message: pb.ForwardBackwardRequest) -> None:
        message.data[0].loss_fn_inputs["target_tokens"].dtype = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda message: message.ClearField("data"), "no datum"),
        (lambda message: message.data[0].ClearField("model_input"), "no tokens"),
        (lambda message: message.data[0].model_input[0].Clear(), "empty chunks"),
        (lambda message: message.ClearField("loss_fn"), "loss_fn"),
        (lambda message: setattr(message, "loss_fn", "x" * 65), "loss_fn"),
        (lambda message: message.loss_fn_config.update({"clip": math.nan}), "clip: not a finite"),
        (lambda message: message.loss_fn_config_v2["clip"].Clear(), "clip: no value"),
        (_image, "image chunks are not supported"),
        (_dmel, "dmel chunks are not supported"),
        (_sparse, "sparse"),
        (_two_dimensions, "2 dimensions"),
        (_other_length, "shape says 4 values, there are 3"),
        (_negative_length, "shape says -3"),
        (_half_a_value, "no whole number"),
        (_half_a_token, "no whole number"),
        (_dtype(pb.DTYPE_UNSPECIFIED), "dtype"),
        (_dtype(pb.DTYPE_BFLOAT16), "dtype"),
        (_dtype(77), "dtype"),
    ],
)
def test_a_malformed_datum_is_an_invalid_request_that_says_why(
    change: Callable[[pb.ForwardBackwardRequest], None], says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says):
        forward_backward_of(parse(message(change).SerializeToString()))


def test_the_unchanged_message_is_fine() -> None:
    assert len(forward_backward_of(parse(message().SerializeToString())).data) == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff\xff\xff",
        b'{"model_id": "m"}',
        message(lambda message: message.ClearField("model_id")).SerializeToString(),
        message(lambda message: setattr(message, "seq_id", 0)).SerializeToString(),
        message(lambda message: setattr(message, "seq_id", -1)).SerializeToString(),
    ],
)
def test_a_message_without_a_turn_is_an_invalid_request(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse(raw)


def test_the_generated_module_is_what_the_proto_file_says() -> None:
    assert not is_stale()


def test_field_numbers_and_types_are_those_of_the_sdk() -> None:
    ours = _numbers(compiled_descriptor())
    theirs = _numbers(descriptor_pb2.FileDescriptorProto.FromString(tinker_public_pb2.DESCRIPTOR.serialized_pb))
    assert ours
    for name, fields in ours.items():
        assert fields == {field: told for field, told in theirs[name].items() if "spans" not in field}, name


def _numbers(descriptor: descriptor_pb2.FileDescriptorProto) -> dict[str, dict[str, tuple[int, int, int, str]]]:
    """Of every message: field name → number, type, label, type name without its package."""
    found: dict[str, dict[str, tuple[int, int, int, str]]] = {}

    def add(prefix: str, one: descriptor_pb2.DescriptorProto) -> None:
        found[prefix + one.name] = {
            field.name: (field.number, field.type, field.label, field.type_name.removeprefix(f".{descriptor.package}."))
            for field in one.field
        }
        for nested in one.nested_type:
            add(f"{prefix}{one.name}.", nested)

    for one in descriptor.message_type:
        add("", one)
    return found
