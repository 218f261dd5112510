"""Reading bodies: types are not bent, unknown fields are ignored, and nothing a client sends is echoed."""

from __future__ import annotations

import time
import tracemalloc

import pytest
import zstandard

from gateway.http.bodies import Body, decompress, read, read_object
from gateway.http.errors import BodyTooLarge
from gateway.http.wire import AdamParams, ModelTurn
from gateway.scheduling.errors import InvalidRequest


class Example(Body):
    number: int
    flag: bool = False


def test_unknown_fields_are_ignored() -> None:
    assert read(Example, b'{"number": 1, "new_in_the_next_release": {"a": [1]}}').number == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b'{"number": "1"}',
        b'{"number": 1.5}',
        b'{"number": 1, "flag": 1}',
        b'{"number": 1, "flag": "yes"}',
        b'{"number": 1, "flag": null}',
        b'{"number": true}',
        b'{"number": 1, "flag": "\\ud800"}',
        b"\xff\xfe",
        b'{"number":' + b"[" * 100_000,
    ],
)
def test_what_is_not_the_body_is_an_invalid_request(raw: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(Example, raw)
    assert 0 < len(caught.value.message) <= 500


def test_a_message_names_the_field_and_not_its_content() -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(Example, b'{"number": "a secret"}')
    assert caught.value.message.startswith("number: ")
    assert "secret" not in caught.value.message


def test_any_object_is_read_and_other_json_is_not() -> None:
    assert read_object(b'{"a": [1]}') == {"a": [1]}
    with pytest.raises(InvalidRequest):
        read_object(b"[1]")


@pytest.mark.parametrize("seq_id", ["0", "-1", "2147483648", "1e400", '"1"', "null", "1" + "0" * 400])
def test_a_number_out_of_range_is_no_turn(seq_id: str) -> None:
    with pytest.raises(InvalidRequest):
        read(ModelTurn, f'{{"model_id": "m", "seq_id": {seq_id}}}'.encode())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", "NaN"),
        ("learning_rate", "-1e-3"),
        ("learning_rate", "Infinity"),
        ("learning_rate", "1e300"),
        ("learning_rate", '"nan"'),
        ("beta1", "1"),
        ("beta2", "-0.1"),
        ("eps", "0"),
        ("eps", "NaN"),
        ("weight_decay", "-1"),
        ("grad_clip_norm", "-1"),
        ("grad_clip_norm", "NaN"),
    ],
)
def test_adam_parameters_that_would_spoil_a_model_are_invalid(field: str, value: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        read(AdamParams, f'{{"{field}": {value}}}'.encode())


def test_a_learning_rate_of_zero_and_whole_numbers_are_fine() -> None:
    assert read(AdamParams, b'{"learning_rate": 0, "weight_decay": 1}').weight_decay == 1.0


def test_a_zstd_frame_comes_back_as_it_was() -> None:
    content = bytes(range(256)) * 1000
    assert decompress(zstandard.compress(content), 1 << 20) == content


def test_a_zstd_bomb_is_refused_early_and_in_bounded_memory() -> None:
    bomb = zstandard.compress(bytes(1 << 30))
    assert len(bomb) < 1 << 17
    tracemalloc.start()
    began = time.monotonic()
    with pytest.raises(BodyTooLarge):
        decompress(bomb, 1 << 20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("raw", [b"", b"not zstd", zstandard.compress(b"x" * 100_000)[:-5]])
def test_what_is_no_whole_zstd_frame_is_an_invalid_request(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decompress(raw, 1 << 20)
