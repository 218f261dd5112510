"""POST /v1/imports: what may be imported by whom, and how it is followed; the import itself is stood in for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.scheduling.imports import Imports
from gateway.scheduling.requests import ImportRequest
from gateway.scheduling.scheduler import Scheduler
from gateway.store.records import Stored
from tests.gateway.http.running import Client, RunningGateway, running_gateway
from tests.gateway.http.test_rest import new_model, wait, write
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import StateSaved


class StandIn:
    """Takes the place of the import's process: holds each until it is let go, and answers as told."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, ImportRequest]] = []
        self.ids: list[str] = []
        self.running = self.most_running = 0
        self.answer: StateSaved | CommandFailed = StateSaved("", "v", 5, 9, True, 123)
        self.go = asyncio.Event()

    async def run(
        self, tenant: str, model_id: str, request: ImportRequest, command_id: str
    ) -> StateSaved | CommandFailed:
        self.asked.append((tenant, model_id, request))
        self.ids.append(command_id)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.go.wait()
        finally:
            self.running -= 1
        return self.answer


class Importing:
    """A gateway that imports from `allowed`."""

    def __init__(self, gateway: RunningGateway, child: StandIn, allowed: Path) -> None:
        self.gateway = gateway
        self.child = child
        self.allowed = allowed
        self.alice = gateway.alice

    def let_go(self) -> None:
        self.gateway.where.loop.call_soon_threadsafe(self.child.go.set)


def imports_of(allowed: Path, child: StandIn) -> Callable[[Scheduler, Stored], Imports]:
    def make(scheduler: Scheduler, stored: Stored) -> Imports:
        imports = Imports(scheduler.futures, scheduler.journal, [allowed], child.run)
        imports.restore(stored)
        return imports

    return make


@pytest.fixture
def importing(directory: Path) -> Iterator[Importing]:
    allowed, child = directory / "allowed", StandIn()
    (allowed / "adapter").mkdir(parents=True)
    with running_gateway(directory, imports=imports_of(allowed, child)) as gateway:
        yield Importing(gateway, child, allowed)


def post(client: Client, path: Path | str, key: str | None = None, **fields: Any) -> httpx.Response:
    headers = {"Idempotency-Key": key} if key else {}
    return client.http.post("/v1/imports", json={"path": str(path), "name": "one", **fields}, headers=headers)


def test_an_import_is_followed_like_any_operation(importing: Importing) -> None:
    alice = importing.alice
    answer = post(alice, importing.allowed / "adapter", load_optimizer=False, format="peft", alpha=16)
    assert answer.status_code == 202
    begun = answer.json()
    assert begun["operation"] == "import"
    model_id = begun["model_id"]
    assert model_id.endswith(":import:0")
    importing.let_go()
    done = wait(alice, answer.headers["location"])
    assert (done["state"], done["error"]) == ("succeeded", None)
    assert done["result"] == {
        "model_id": model_id,
        "path": f"tinker://{model_id}/weights/one",
        "size_bytes": 123,
        "step": 5,
        "iteration": 9,
        "has_optimizer": True,
    }
    allowed = importing.allowed.resolve()
    asked = ImportRequest(str(allowed / "adapter"), str(allowed), "one", "peft", False, 16.0, False)
    assert importing.child.asked == [("alice", model_id, asked)]
    assert importing.gateway.bob.http.get(answer.headers["location"]).status_code == 404


def test_a_refusal_of_the_import_is_the_operations_error(importing: Importing) -> None:
    importing.child.answer = CommandFailed(ErrorKind.CHECKPOINT_INCOMPATIBLE, "adapter_config.json: use_dora is set")
    importing.let_go()
    done = write(importing.alice, "POST", "/v1/imports", {"path": str(importing.allowed), "name": "one"})
    assert done["state"] == "failed"
    assert done["error"] == {
        "kind": "checkpoint_incompatible",
        "category": "user",
        "message": "adapter_config.json: use_dora is set",
    }


def test_only_what_lies_in_an_allowed_directory_is_imported(importing: Importing) -> None:
    allowed = importing.allowed
    outside = allowed.parent / "outside"
    outside.mkdir()
    (allowed / "link").symlink_to(outside)
    (allowed / "loop").symlink_to(allowed / "loop")
    (allowed.parent / "allowed-too").mkdir()
    paths = (
        *(outside, allowed / "link", allowed / ".." / "outside", allowed / "adapter" / ".." / ".." / "outside"),
        *(allowed.parent / "allowed-too", allowed.parent, "/", "adapter", "", "\0", f"{allowed}/\0", "/etc/passwd"),
        *(f"{allowed}/../outside", allowed.parent / "absent"),
    )
    for path in paths:
        refused = post(importing.alice, path)
        assert (refused.status_code, refused.json()["type"]) == (403, "import_not_allowed"), path
    told = {post(importing.alice, path).text for path in (outside, allowed.parent / "absent", allowed / "link")}
    assert len(told) == 1, "what is there and what is not look the same"
    assert importing.child.asked == []
    # A link from without leads in, and dots that stay inside are fine.
    (allowed.parent / "entrance").symlink_to(allowed)
    importing.let_go()
    for path in (allowed.parent / "entrance" / "adapter", allowed / "adapter" / ".." / "adapter"):
        assert post(importing.alice, path).status_code == 202


def test_where_the_operator_allows_none_there_are_no_imports(gateway: RunningGateway, directory: Path) -> None:
    refused = post(gateway.alice, directory)
    assert (refused.status_code, refused.json()["type"]) == (403, "import_not_allowed")


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "../one"},
        {"name": "one."},
        {"name": ""},
        {"path": None},
        {"path": 1},
        {"format": "pickle"},
        {"alpha": 0},
        {"alpha": "8"},
        {"load_optimizer": "yes"},
        {"model_id": ""},
    ],
)
def test_a_body_that_cannot_be_meant_is_422(importing: Importing, fields: dict[str, Any]) -> None:
    refused = importing.alice.http.post("/v1/imports", json={"path": str(importing.allowed), "name": "one", **fields})
    assert (refused.status_code, refused.json()["type"]) == (422, "invalid_request")


def test_pickles_cannot_be_trusted_from_here(importing: Importing) -> None:
    importing.let_go()
    answer = post(importing.alice, importing.allowed, trust_pickle=True)
    assert wait(importing.alice, answer.headers["location"])["state"] == "succeeded"
    [(_, _, request)] = importing.child.asked
    assert "trust_pickle" not in request.__struct_fields__


def test_imports_go_one_at_a_time_in_the_order_they_came(importing: Importing) -> None:
    answers = [post(importing.alice, importing.allowed / "adapter", name=f"n{number}") for number in range(5)]
    importing.let_go()
    done = [wait(importing.alice, answer.headers["location"]) for answer in answers]
    assert all(operation["state"] == "succeeded" for operation in done)
    assert importing.child.most_running == 1
    assert [request.name for _, _, request in importing.child.asked] == ["n0", "n1", "n2", "n3", "n4"]
    assert len({operation["model_id"] for operation in done}) == 5


def test_too_many_that_wait_are_told_to_come_again(importing: Importing) -> None:
    statuses = [post(importing.alice, importing.allowed, name=f"n{number}").status_code for number in range(20)]
    assert set(statuses) == {202, 429}
    assert statuses.index(429) >= 16
    importing.let_go()


def test_an_import_that_is_sent_again_is_run_once(importing: Importing) -> None:
    answers = [post(importing.alice, importing.allowed / "adapter", key="k") for _ in range(3)]
    assert len({answer.json()["id"] for answer in answers}) == 1
    other = post(importing.alice, importing.allowed / "adapter", key="k", name="two")
    assert (other.status_code, other.json()["type"]) == (422, "sequence_conflict")
    importing.let_go()
    wait(importing.alice, answers[0].headers["location"])
    assert len(importing.child.asked) == 1


def test_an_import_may_be_of_a_model_of_ones_own_and_of_nobody_elses(importing: Importing) -> None:
    model_id = new_model(importing.alice)
    importing.let_go()
    answer = post(importing.alice, importing.allowed, model_id=model_id)
    assert wait(importing.alice, answer.headers["location"])["result"]["path"] == f"tinker://{model_id}/weights/one"
    for client, asked in ((importing.gateway.bob, model_id), (importing.alice, "startup:train:0")):
        refused = post(client, importing.allowed, model_id=asked)
        assert (refused.status_code, refused.json()["type"]) == (404, "not_found")


def test_an_import_that_a_gateway_left_is_done_by_the_next_under_the_same_id(directory: Path) -> None:
    allowed, children = directory / "allowed", [StandIn(), StandIn()]
    allowed.mkdir()
    answers = []
    with running_gateway(directory, imports=imports_of(allowed, children[0])) as gateway:
        answers = [post(gateway.alice, allowed, key=name, name=name) for name in ("a", "b")]
        while not children[0].running:
            gateway.alice.get(answers[0].headers["location"])
        gateway.where.run(gateway.app.state.gateway.imports.stop())
        assert children[0].running == 0
        assert gateway.alice.get(answers[0].headers["location"])["state"] == "running"
        refused = post(gateway.alice, allowed)
        assert (refused.status_code, refused.json()["type"]) == (503, "stopping")
    with running_gateway(directory, imports=imports_of(allowed, children[1])) as gateway:
        gateway.where.loop.call_soon_threadsafe(children[1].go.set)
        for answer in answers:
            assert wait(gateway.alice, answer.headers["location"])["state"] == "succeeded"
        assert children[0].ids + children[1].ids == [children[1].ids[0], *children[1].ids]
        again = post(gateway.alice, allowed, key="a", name="a")
        assert again.json()["id"] == answers[0].json()["id"]
        assert len(children[1].asked) == 2
