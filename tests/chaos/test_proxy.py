"""The proxy's faults are real, and the SDK and the gateway get over each: against a gateway with a fake cell."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from tests.chaos.clients import carry_out, first_difference
from tests.chaos.programme import Save, programme
from tests.chaos.progress import Progress
from tests.chaos.proxy import Fault, FaultPlan, Proxy
from tests.gateway.http.running import ALICE, RunningGateway, running_gateway
from trainer_cell.protocol.commands import CreateModel, ForwardBackward, OptimStep, SaveState

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[RunningGateway]:
    with running_gateway(tmp_path) as gateway:
        yield gateway


def always(fault: Fault) -> FaultPlan:
    return FaultPlan("always", {fault: 1.0})


def open_session(client: httpx.Client) -> httpx.Response:
    return client.post("/api/v1/create_session", json={"tags": []}, headers={"X-API-Key": ALICE})


def num_sessions(gateway: RunningGateway) -> int:
    return len(gateway.alice.get("/api/v1/sessions")["sessions"])


@pytest.mark.parametrize(
    ("fault", "opened"), [(Fault.BEFORE, 0), (Fault.AFTER, 1), (Fault.MIDDLE, 1), (Fault.TWICE, 2)]
)
def test_a_fault_does_to_a_request_what_it_says(gateway: RunningGateway, fault: Fault, opened: int) -> None:
    with Proxy(gateway.where.url, always(fault)) as proxy, httpx.Client(base_url=proxy.url) as client:
        if fault is Fault.TWICE:
            assert open_session(client).is_success
        else:
            with pytest.raises(httpx.RemoteProtocolError):
                open_session(client)
        assert proxy.counts == {fault: 1}
    assert num_sessions(gateway) == opened


def test_a_late_repetition_comes_after_the_next_request(gateway: RunningGateway) -> None:
    with Proxy(gateway.where.url, always(Fault.LATE)) as proxy, httpx.Client(base_url=proxy.url) as client:
        open_session(client)
        assert num_sessions(gateway) == 1
        client.get("/healthz")
        while num_sessions(gateway) < 2:
            pass


class Forgetful(BaseHTTPRequestHandler):
    """A gateway that takes every request for a new one."""

    numbers = itertools.count()

    def do_POST(self) -> None:
        body = json.dumps({"request_id": f"future-{next(self.numbers)}"}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def forgetful() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Forgetful) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def save(client: httpx.Client, model_id: str) -> None:
    body = {"model_id": model_id, "path": "s", "seq_id": 1}
    assert client.post("/api/v1/save_weights", json=body, headers={"X-API-Key": ALICE}).is_success


def test_a_repeated_request_that_is_taken_for_another_one_is_noticed(gateway: RunningGateway, forgetful: str) -> None:
    with Proxy(forgetful, always(Fault.TWICE)) as proxy, httpx.Client(base_url=proxy.url) as client:
        save(client, "m")
        assert len(proxy.disagreements) == 1
    with Proxy(gateway.where.url, always(Fault.TWICE)) as proxy, httpx.Client(base_url=proxy.url) as client:
        save(client, gateway.alice.new_model())
        assert proxy.disagreements == []


def test_the_same_seed_plans_the_same_faults_and_another_one_others() -> None:
    def drawn(seed: int) -> list[Fault | None]:
        plan = FaultPlan(seed)
        return [plan.next() for _ in range(1000)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert set(drawn(1)) == {None, *Fault}


def test_a_client_under_faults_gets_the_answers_of_an_undisturbed_one_and_nothing_runs_twice(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.chaos.clients.API_KEY", ALICE)
    assert gateway.cell is not None
    kinds = (CreateModel, ForwardBackward, OptimStep, SaveState)
    operations = programme(0, 10)
    assert any(isinstance(operation, Save) for operation in operations)
    progress = Progress(1)
    progress.quiet()
    quiet = carry_out(gateway.where.url, 0, operations, progress)
    once = {kind: gateway.cell.count(kind) for kind in kinds}
    with Proxy(gateway.where.url, FaultPlan(0, dict.fromkeys(Fault, 0.05))) as proxy:
        disturbed = carry_out(proxy.url, 0, operations, progress)
    assert set(proxy.counts) == set(Fault)
    assert proxy.disagreements == []
    assert first_difference(quiet, disturbed) is None
    assert {kind: gateway.cell.count(kind) for kind in kinds} == {kind: 2 * count for kind, count in once.items()}
