"""Bodies over the limit, keys that are wrong: an answer early, nothing read that need not be."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.types import ASGIApp

from gateway.http.auth import Keyring, TenantGate
from gateway.http.bodies import MAX_JSON_BYTES
from gateway.http.errors import LastResort, on_refused
from gateway.http.limits import BodyLimit
from gateway.scheduling.errors import Refused
from tests.gateway.http.listening import Listening, listening
from tests.gateway.http.running import RunningGateway

LIMIT = 1 << 20
KEY = "tml-a"


def app_that_counts(counts: list[int], *, is_limited: bool = True) -> ASGIApp:
    app = FastAPI()
    app.add_exception_handler(Refused, on_refused)

    @app.post("/")
    async def count(request: Request) -> dict[str, object]:
        counts.append(len(await request.body()))
        return {"tenant": request.state.tenant}

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("a secret detail")

    if is_limited:
        app.add_middleware(BodyLimit, max_body_bytes=LIMIT)
    app.add_middleware(TenantGate, keyring=Keyring({KEY: "alice", "tml-b": "bob"}))
    app.add_middleware(LastResort)
    return app


@pytest.fixture
def counts() -> list[int]:
    return []


@pytest.fixture
def server(counts: list[int]) -> Iterator[Listening]:
    with listening(app_that_counts(counts)) as running:
        yield running


def head(*lines: str, key: str | None = KEY, method: str = "POST /") -> bytes:
    keys = [] if key is None else [f"X-API-Key: {key}"]
    return "\r\n".join([f"{method} HTTP/1.1", "Host: x", *keys, *lines, "", ""]).encode()


def answer_to(server: Listening, *pieces: bytes, keep_sending: bytes = b"", at_most: int = 0) -> tuple[int, bytes, int]:
    """Status, whole answer, and how many bytes of `keep_sending` could be sent before the answer came."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        for piece in pieces:
            connection.sendall(piece)
        sent = 0
        connection.setblocking(False)
        while keep_sending and sent < at_most:
            try:
                if connection.recv(1, socket.MSG_PEEK):
                    break
            except BlockingIOError:
                pass
            try:
                sent += connection.send(keep_sending)
            except BlockingIOError:
                continue
            except OSError:
                break
        connection.setblocking(True)
        connection.settimeout(20)
        answer = b""
        while b"\r\n\r\n" not in answer or b"}" not in answer:
            got = connection.recv(65536)
            if not got:
                break
            answer += got
    return int(answer.split()[1]), answer, sent


def test_a_body_under_the_limit_reaches_the_route(server: Listening, counts: list[int]) -> None:
    status, answer, _ = answer_to(server, head(f"Content-Length: {LIMIT}"), bytes(LIMIT))
    assert (status, counts) == (200, [LIMIT])
    assert b'"tenant":"alice"' in answer


def test_a_declared_length_over_the_limit_is_refused_before_the_body_comes(
    server: Listening, counts: list[int]
) -> None:
    status, answer, _ = answer_to(server, head("Content-Length: 4294967296"))
    assert (status, counts) == (413, [])
    assert b"body_too_large" in answer


def test_a_client_that_sends_on_regardless_still_reads_the_refusal(server: Listening, counts: list[int]) -> None:
    status, _, _ = answer_to(server, head(f"Content-Length: {2 * LIMIT}"), bytes(2 * LIMIT))
    assert (status, counts) == (413, [])


def test_a_chunked_body_is_refused_as_soon_as_it_is_over_the_limit(server: Listening, counts: list[int]) -> None:
    chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
    status, _, sent = answer_to(server, head("Transfer-Encoding: chunked"), keep_sending=chunk, at_most=256 << 20)
    assert (status, counts) == (413, [])
    assert sent < 64 << 20


def test_without_the_limit_the_same_chunked_body_would_be_taken(counts: list[int]) -> None:
    with listening(app_that_counts(counts, is_limited=False)) as server:
        chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
        status, _, _ = answer_to(server, head("Transfer-Encoding: chunked"), chunk * 32, b"0\r\n\r\n")
    assert (status, counts) == (200, [32 * 0x10000])


@pytest.mark.parametrize("key", [None, "tml-c", "", "tml-a ", "Tml-a", "tml-a\xe4"])
def test_a_missing_or_wrong_key_is_refused_before_the_body_comes(
    server: Listening, counts: list[int], key: str | None
) -> None:
    key = "tml-a x" if key == "tml-a " else key
    status, answer, _ = answer_to(server, head("Content-Length: 4294967296", key=key))
    assert (status, counts) == (401, [])
    assert b"unauthorized" in answer
    assert b"www-authenticate" in answer.lower()


def test_a_bearer_token_is_a_key_too(server: Listening) -> None:
    status, answer, _ = answer_to(server, head("Authorization: Bearer tml-b", "Content-Length: 0", key=None))
    assert status == 200
    assert b'"tenant":"bob"' in answer


def test_a_wrong_key_is_not_mended_by_a_right_token(server: Listening) -> None:
    lines = ("Authorization: Bearer tml-b", "Content-Length: 0")
    assert answer_to(server, head(*lines, key="tml-c"))[0] == 401


def test_a_bug_in_a_route_is_a_json_500_without_a_traceback(server: Listening) -> None:
    status, answer, _ = answer_to(server, head(method="GET /broken"))
    assert status == 500
    assert b'"type":"internal"' in answer
    assert b"secret" not in answer
    assert b"Traceback" not in answer


def test_a_client_that_hangs_up_in_the_middle_of_its_body_is_no_error(
    server: Listening, counts: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="gateway"):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head("Content-Length: 100") + b"x" * 50)
        deadline = time.monotonic() + 5
        while "hung up" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "hung up" in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    assert counts == []


def test_json_bodies_have_a_limit_of_their_own(shared_gateway: RunningGateway) -> None:
    tags = ["x" * 1000] * 300
    assert shared_gateway.alice.post("create_session", tags=tags[:200]).status_code == 200
    answer = shared_gateway.alice.post("telemetry", events=["x" * (MAX_JSON_BYTES - 100)])
    assert answer.status_code == 200
    answer = shared_gateway.alice.http.post("/api/v1/telemetry", content=b"x" * (MAX_JSON_BYTES + 1))
    assert (answer.status_code, answer.json()["type"]) == (413, "body_too_large")
