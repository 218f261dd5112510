"""The long poll: what is told, when, to whom, and that a lost answer can be asked for again."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tinker.proto.response_conv import deserialize_forward_backward_output

from gateway.http.limits import Limits
from gateway.scheduling.futures import Future
from tests.gateway.http.running import ALICE, RunningGateway, forward_backward, running_gateway
from trainer_cell.protocol.commands import ForwardBackward, OptimStep
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import ForwardBackwardDone, OptimStepDone

PROTOBUF = "application/x-protobuf"


def future_of(gateway: RunningGateway, accepted: httpx.Response) -> Future:
    return gateway.scheduler.futures.get("alice", accepted.json()["request_id"])


def finish(gateway: RunningGateway, future: Future, outcome: Any) -> None:
    async def finish_now() -> None:
        gateway.scheduler.futures.finish(future, outcome)

    gateway.where.run(finish_now())


def waiting(gateway: RunningGateway) -> tuple[str, Future]:
    """A command that waits for a number that does not come."""
    model_id = gateway.alice.new_model()
    accepted = gateway.alice.post("optim_step", model_id=model_id, seq_id=2, adam_params={})
    return accepted.json()["request_id"], future_of(gateway, accepted)


def test_what_is_not_done_is_408_after_the_time_of_a_poll(gateway: RunningGateway) -> None:
    request_id, _ = waiting(gateway)
    began = time.monotonic()
    answer = gateway.alice.poll(request_id)
    assert time.monotonic() - began >= 0.2
    assert answer.status_code == 408
    assert answer.json() == {"type": "try_again", "request_id": request_id, "queue_state": "active"}


def test_a_poll_says_that_the_cell_is_away(directory: Path) -> None:
    with running_gateway(directory, cell=False) as gateway:
        session_id = gateway.alice.session()
        accepted = gateway.alice.post(
            "create_model", session_id=session_id, model_seq_id=0, base_model="tiny", lora_config={"rank": 4}
        )
        answer = gateway.alice.poll(accepted.json()["request_id"])
        assert answer.status_code == 408
        assert answer.json()["queue_state"] == "paused_capacity"
        gateway.attach_cell()
        assert gateway.alice.result(accepted).json()["type"] == "create_model"


def test_a_poll_says_how_far_a_save_is_and_why_another_waits(gateway: RunningGateway) -> None:
    assert gateway.cell is not None
    model_id = gateway.alice.new_model()
    hold = gateway.cell.hold_next_publish()
    saving, waiting = (
        gateway.alice.post("save_weights", model_id=model_id, seq_id=seq_id, path=f"n{seq_id}").json()["request_id"]
        for seq_id in (1, 2)
    )
    hold.wait_reached()
    gateway.alice.new_model(model_seq_id=1)
    assert gateway.alice.poll(saving).json()["queue_state_reason"] == "writing: 0.0 of 0.0 MB"
    reason = "an earlier save of this model is being written"
    assert gateway.alice.poll(waiting).json() == {
        "type": "try_again",
        "request_id": waiting,
        "queue_state": "paused_capacity",
        "queue_state_reason": reason,
    }
    assert gateway.alice.get(f"/v1/operations/{waiting}")["waiting_for"] == reason
    assert gateway.alice.get(f"/v1/operations/{saving}")["progress"] == {"bytes_done": 0, "bytes_total": 96}
    hold.release()


def test_a_result_reaches_a_waiting_poll_at_once(directory: Path) -> None:
    with running_gateway(directory, Limits(poll_s=60)) as gateway:
        request_id, future = waiting(gateway)
        timer = threading.Timer(0.3, finish, (gateway, future, OptimStepDone("c", 1, 1, {"grad_norm": 1.0})))
        timer.start()
        began = time.monotonic()
        answer = gateway.alice.poll(request_id)
        timer.join()
        assert answer.json()["metrics"] == {"grad_norm": 1.0}
        assert time.monotonic() - began < 5


def test_a_failure_is_200_with_its_category_and_can_be_read_again(gateway: RunningGateway) -> None:
    request_id, future = waiting(gateway)
    finish(gateway, future, CommandFailed(ErrorKind.STORAGE_FAILED, "rank 1: write: ENOSPC"))
    for _ in range(2):
        answer = gateway.alice.poll(request_id)
        assert answer.status_code == 200
        assert answer.json() == {
            "error": "rank 1: write: ENOSPC",
            "category": "server",
            "kind": "storage_failed",
        }


def test_a_result_reads_the_same_again_and_again(gateway: RunningGateway) -> None:
    model_id = gateway.alice.new_model()
    accepted = gateway.alice.send_forward_backward(forward_backward(model_id, 1))
    first = gateway.alice.result(accepted, PROTOBUF)
    again = gateway.alice.result(accepted, PROTOBUF)
    assert first.content == again.content
    assert first.headers["content-type"] == PROTOBUF


def test_numbers_that_are_not_finite_do_not_break_an_answer(gateway: RunningGateway) -> None:
    request_id, future = waiting(gateway)
    logprobs = np.array([math.nan, -math.inf, -1.0], dtype=np.float32)
    finish(gateway, future, ForwardBackwardDone("c", (logprobs.tobytes(),), {"loss:sum": math.nan, "a:max": math.inf}))
    future.operation = "forward_backward"
    in_protobuf = deserialize_forward_backward_output(gateway.alice.poll(request_id, PROTOBUF).content)
    np.testing.assert_array_equal(in_protobuf.loss_fn_outputs[0]["logprobs"].to_numpy(), logprobs)
    assert math.isnan(in_protobuf.metrics["loss:sum"])
    in_json = gateway.alice.poll(request_id)
    strict = json.loads(in_json.content, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    assert strict["metrics"] == {}
    assert strict["loss_fn_outputs"][0]["logprobs"]["data"] == [None, None, -1.0]


def test_metrics_of_a_step_that_are_not_finite_are_left_out(gateway: RunningGateway) -> None:
    request_id, future = waiting(gateway)
    finish(gateway, future, OptimStepDone("c", 0, 0, {"grad_norm": math.inf, "skipped_non_finite": 1.0}))
    assert gateway.alice.poll(request_id).json()["metrics"] == {"skipped_non_finite": 1.0}
    operation = gateway.alice.get(f"/v1/operations/{request_id}")
    assert operation["result"]["metrics"] == {"skipped_non_finite": 1.0}


@pytest.mark.parametrize("request_id", ["future-0", "x", "../x", "\0"])
def test_an_unknown_future_is_404_at_once(shared_gateway: RunningGateway, request_id: str) -> None:
    answer = shared_gateway.alice.poll(request_id)
    assert answer.status_code == 404
    assert answer.json()["type"] == "not_found"


def test_an_answer_is_told_only_once_a_client_was_there_to_hear_it(gateway: RunningGateway) -> None:
    request_id, future = waiting(gateway)
    poll_and_hang_up(gateway, request_id)
    finish(gateway, future, OptimStepDone("c", 1, 1, {}))
    assert not future.told
    for _ in range(2):
        assert gateway.alice.poll(request_id).json()["step"] == 1
    # The second request on the connection came after all that belongs to the first.
    assert future.told


def test_an_answer_that_comes_while_the_client_hangs_up_is_there_for_the_next_poll(directory: Path) -> None:
    with running_gateway(directory, Limits(poll_s=30)) as gateway:
        for _ in range(20):
            request_id, future = waiting(gateway)
            connection = open_poll(gateway, request_id)
            timer = threading.Timer(0.005, finish, (gateway, future, OptimStepDone("c", 1, 1, {})))
            timer.start()
            time.sleep(0.005)
            connection.close()
            timer.join()
            assert gateway.alice.poll(request_id).json()["step"] == 1


def test_polls_that_were_dropped_leave_nothing_behind(directory: Path) -> None:
    with running_gateway(directory, Limits(poll_s=60)) as gateway:
        request_id, future = waiting(gateway)
        gateway.alice.get("/v1/models")
        before = gateway.where.run(num_tasks())
        connections = [open_poll(gateway, request_id) for _ in range(100)]
        assert within(5, lambda: gateway.where.run(num_tasks()) >= before + 100)
        for connection in connections:
            connection.close()
        assert within(5, lambda: gateway.where.run(num_tasks()) <= before)
        finish(gateway, future, OptimStepDone("c", 1, 1, {}))
        assert gateway.alice.poll(request_id).json()["step"] == 1


def test_a_stop_ends_open_polls_with_429_and_lets_the_running_command_finish(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_gateway(directory, Limits(poll_s=60)) as gateway:
        assert gateway.cell is not None
        alice = gateway.alice
        model_id = alice.new_model()
        hold = gateway.cell.hold_next(ForwardBackward)
        running = alice.send_forward_backward(forward_backward(model_id, 1)).json()["request_id"]
        hold.wait_reached()
        waits = alice.post("optim_step", model_id=model_id, seq_id=2, adam_params={}).json()["request_id"]
        answers: list[httpx.Response] = []
        polls = [threading.Thread(target=lambda: answers.append(alice.poll(waits))) for _ in range(10)]
        for poll in polls:
            poll.start()
        assert within(5, lambda: len(gateway.scheduler.futures.get("alice", waits)._waiters) == 10)
        gateway.where.stop()
        for poll in polls:
            poll.join(5)
        assert {(answer.status_code, answer.headers["retry-after"]) for answer in answers} == {(429, "5")}
        # While what runs is finished, requests are still answered.
        refused = alice.post("optim_step", model_id=model_id, seq_id=3, adam_params={})
        assert (refused.status_code, refused.json()["type"]) == (503, "stopping")
        assert int(refused.headers["retry-after"]) > 0
        assert alice.poll(running).status_code == 429
        assert alice.http.get(f"/v1/operations/{running}", params={"wait": 30}).status_code == 429
        assert alice.http.get(f"/v1/operations/{running}").json()["state"] == "running"
        assert alice.http.get("/readyz").status_code == 503
        hold.release()
        assert within(10, lambda: gateway.scheduler.futures.get("alice", running).state == "succeeded")
        assert gateway.cell.count(OptimStep) == 0
    assert not [record for record in caplog.records if record.exc_info]


async def num_tasks() -> int:
    return len(asyncio.all_tasks())


def within(seconds: float, is_so: Any) -> bool:
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def open_poll(gateway: RunningGateway, request_id: str) -> socket.socket:
    body = json.dumps({"request_id": request_id}).encode()
    connection = socket.create_connection(("127.0.0.1", gateway.where.port))
    connection.sendall(
        b"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        + f"X-API-Key: {ALICE}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return connection


def poll_and_hang_up(gateway: RunningGateway, request_id: str) -> None:
    connection = open_poll(gateway, request_id)
    future = gateway.scheduler.futures.get("alice", request_id)
    assert within(5, lambda: len(future._waiters) == 1)
    connection.close()
    assert within(5, lambda: len(future._waiters) == 0)
