"""Whatever is sent to whatever route: a typed 4xx or a failed future, at once. Never a 5xx, never a wait."""

from __future__ import annotations

import json
import time

import hypothesis
import pytest
from hypothesis import strategies

from tests.gateway.http.routes import Route, all_routes
from tests.gateway.http.running import RunningGateway, forward_backward

JSON = {"Content-Type": "application/json"}
PROTOBUF = {"Content-Type": "application/x-protobuf"}
BODIES: dict[str, tuple[bytes, dict[str, str]]] = {
    "nothing": (b"", JSON),
    "an empty object": (b"{}", JSON),
    "null": (b"null", JSON),
    "a list": (b"[]", JSON),
    "a string": (b'"x"', JSON),
    "half an object": (b'{"model_id": "x', JSON),
    "bytes": (b"\x00\xff\xfe\x80", JSON),
    "nested lists": (b'{"model_id":' + b"[" * 50_000, JSON),
    "nested objects": (b'{"a":' * 50_000, JSON),
    "a surrogate": (b'{"session_id": "\\ud800", "model_id": "\\ud800", "seq_id": 1}', JSON),
    "a nul": (b'{"session_id": "\\u0000", "model_id": "\\u0000", "seq_id": 1, "request_id": "\\u0000"}', JSON),
    "nan": (b'{"model_id": NaN, "seq_id": NaN}', JSON),
    "a long number": (b'{"model_id": "x", "seq_id": 1' + b"0" * 5000 + b"}", JSON),
    "a long name": (b'{"model_id": "' + b"x" * 1_000_000 + b'", "seq_id": 1}', JSON),
    "other types": (b'{"model_id": 1, "seq_id": "1", "session_id": [], "model_seq_id": {}, "request_id": true}', JSON),
    "both addressings": (b'{"model_id": "m", "seq_id": 1, "session_id": "s", "model_seq_id": 0}', JSON),
    "text": (b"{}", {"Content-Type": "text/plain"}),
    "a form": (b"a=b", {"Content-Type": "application/x-www-form-urlencoded"}),
    "no content type": (b"{}", {}),
    "a nonsense content type": (b"{}", {"Content-Type": ";;;"}),
    "gzip": (b"\x1f\x8b\x08", {**JSON, "Content-Encoding": "gzip"}),
    "zstd that is none": (b"xxxx", {**PROTOBUF, "Content-Encoding": "zstd"}),
    "an encoding that is none": (b"xxxx", {**PROTOBUF, "Content-Encoding": "rot13"}),
    "protobuf that is none": (b"\xff\xff\xff\xff", PROTOBUF),
    "protobuf of an unknown model": (forward_backward("nobody:train:0", 1), PROTOBUF),
    "an idempotency key that is none": (b"{}", {**JSON, "Idempotency-Key": "x y"}),
}


def refused(gateway: RunningGateway, route: Route, path: str, raw: bytes, headers: dict[str, str]) -> int:
    """Send it, check the answer, give the status."""
    began = time.monotonic()
    answer = gateway.alice.http.request(route.method, path, content=raw, headers=headers)
    assert time.monotonic() - began < 5, (route, raw[:100])
    assert answer.status_code < 500, (route, raw[:100], answer.text)
    assert answer.status_code not in (408, 409), (route, raw[:100])
    if answer.status_code >= 400:
        told = answer.json()
        assert set(told) == {"type", "detail"}, route
        assert 0 < len(told["detail"]) <= 600
        assert "Traceback" not in told["detail"]
    return answer.status_code


@pytest.mark.parametrize("body", BODIES)
def test_a_bad_body_gets_a_typed_refusal_from_every_route(shared_gateway: RunningGateway, body: str) -> None:
    raw, headers = BODIES[body]
    for route in all_routes(shared_gateway):
        if route.has_body:
            refused(shared_gateway, route, route.filled(), raw, headers)


@pytest.mark.parametrize(
    "value",
    ["%00", "%0a", "...", "%2e%2e%2f", "%ff", "a%2Fb", "x" * 3000, "%F0%9F%98%80", "a:b:c", "~", "tinker:%2F%2F"],
)
def test_a_strange_path_gets_a_typed_refusal_from_every_route(shared_gateway: RunningGateway, value: str) -> None:
    for route in all_routes(shared_gateway):
        if "{" in route.path:
            status = refused(shared_gateway, route, route.filled(value), b'{"reason": {"type": "success"}}', JSON)
            assert status >= 400, route


@pytest.mark.parametrize(
    "query", ["limit=-1", "limit=x", "limit=99999999999999999999", "offset=-1", "limit=", "wait=nan"]
)
def test_a_strange_query_gets_a_typed_refusal(shared_gateway: RunningGateway, query: str) -> None:
    for path in ("/api/v1/training_runs", "/api/v1/checkpoints", "/api/v1/sessions", "/v1/checkpoints"):
        if "wait" not in query:
            assert refused(shared_gateway, Route("GET", path, False), f"{path}?{query}", b"", {}) == 422
    refused(shared_gateway, Route("GET", "/v1/operations", False), f"/v1/operations/x?{query}", b"", {})


def test_other_methods_and_unknown_routes_are_typed_too(shared_gateway: RunningGateway) -> None:
    for route in all_routes(shared_gateway):
        assert refused(shared_gateway, Route("PATCH", route.path, False), route.filled(), b"{}", JSON) in (404, 405)
    assert refused(shared_gateway, Route("GET", "/", False), "/api/v1/forward", b"", {}) == 404


names = strategies.sampled_from(
    (
        "model_id seq_id session_id model_seq_id base_model lora_config rank seed path name optimizer load_optimizer "
        "overwrite ttl_seconds user_metadata adam_params learning_rate optimizer_config optimizer_params type reason "
        "detail tinker_path request_id tags weights_access_token train_attn"
    ).split()
)
json_values = strategies.recursive(
    strategies.none()
    | strategies.booleans()
    | strategies.integers()
    | strategies.floats()
    | strategies.text()
    | strategies.sampled_from(["x", "tinker://m/weights/a", "tinker://../weights/x", "cellgate/tiny", "adamw"]),
    lambda children: strategies.lists(children, max_size=3) | strategies.dictionaries(names, children, max_size=4),
    max_leaves=8,
)


@hypothesis.settings(
    max_examples=60, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(data=strategies.data())
def test_invented_bodies_get_typed_refusals_or_futures_that_end(
    shared_gateway: RunningGateway, data: strategies.DataObject
) -> None:
    route = data.draw(strategies.sampled_from([route for route in all_routes(shared_gateway) if route.has_body]))
    body = data.draw(strategies.dictionaries(names, json_values, max_size=8))
    path = route.filled(data.draw(strategies.sampled_from(["x", "m:train:0"])))
    refused(shared_gateway, route, path, json.dumps(body).encode(), JSON)


@hypothesis.settings(
    max_examples=60, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(data=strategies.data())
def test_a_broken_protobuf_gets_a_typed_refusal_or_a_future_that_ends(
    shared_gateway: RunningGateway, data: strategies.DataObject
) -> None:
    raw = bytearray(forward_backward("nobody:train:0", 1))
    for _ in range(data.draw(strategies.integers(1, 6))):
        raw[data.draw(strategies.integers(0, len(raw) - 1))] = data.draw(strategies.integers(0, 255))
    cut = data.draw(strategies.integers(0, len(raw)))
    route = Route("POST", "/api/v1/forward_backward", True)
    assert refused(shared_gateway, route, route.path, bytes(raw[:cut]), PROTOBUF) in (404, 422)
