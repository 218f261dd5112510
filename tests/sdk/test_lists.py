"""The SDK's RestClient and command line, which have no session."""

from __future__ import annotations

import json
from datetime import UTC

import pytest
import tinker
from click.testing import CliRunner
from tinker.cli.__main__ import main_cli

from tests.gateway.http.running import ALICE, RunningGateway
from tests.sdk.test_training import new_client, train


@pytest.fixture
def rest(gateway: RunningGateway) -> tinker.RestClient:
    return tinker.RestClient(base_url=gateway.where.url, api_key=ALICE)


def test_runs_and_checkpoints_are_listed_and_deleted(service: tinker.ServiceClient, rest: tinker.RestClient) -> None:
    client = new_client(service)
    train(client)
    paths = [client.save_state(name).result().path for name in ("a", "b")]
    runs = rest.list_training_runs().result()
    assert [run.training_run_id for run in runs.training_runs] == [client.model_id]
    assert runs.cursor.total_count == 1
    run = rest.get_training_run(client.model_id).result()
    assert (run.base_model, run.lora_rank, run.is_lora) == ("cellgate/tiny", 8, True)
    assert run.last_request_time.astimezone(UTC) == run.last_request_time
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == paths[1]
    assert rest.get_training_run_by_tinker_path(paths[0]).result().training_run_id == client.model_id

    listed = rest.list_checkpoints(client.model_id).result().checkpoints
    assert [(one.checkpoint_id, one.checkpoint_type) for one in listed] == [
        ("weights/b", "training"),
        ("weights/a", "training"),
    ]
    assert [one.tinker_path for one in rest.list_user_checkpoints().result().checkpoints] == paths[::-1]
    info = rest.get_weights_info_by_tinker_path(paths[0]).result()
    assert (info.base_model, info.lora_rank, info.train_mlp) == ("cellgate/tiny", 8, True)

    rest.delete_checkpoint_from_tinker_path(paths[0]).result()
    rest.delete_checkpoint(client.model_id, "weights/b").result()
    assert rest.list_user_checkpoints().result().checkpoints == []
    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint_from_tinker_path(paths[0]).result()
    with pytest.raises(tinker.NotFoundError):
        rest.get_training_run("none:train:0").result()


def test_a_ttl_is_set_and_removed_and_an_impossible_one_refused_at_once(
    service: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    client = new_client(service)
    path = client.save_state("a", ttl_seconds=3600).result().path

    def expires() -> object:
        return rest.list_checkpoints(client.model_id).result().checkpoints[0].expires_at

    assert expires() is not None
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert expires() is None
    rest.set_checkpoint_ttl_from_tinker_path(path, 86_400).result()
    assert expires() is not None
    with pytest.raises(tinker.UnprocessableEntityError):
        rest.set_checkpoint_ttl_from_tinker_path(path, 5).result()
    with pytest.raises(tinker.NotFoundError):
        rest.set_checkpoint_ttl_from_tinker_path(path + "x", None).result()


def test_sessions_and_capabilities_are_told(service: tinker.ServiceClient, rest: tinker.RestClient) -> None:
    client = new_client(service)
    session_id = client.model_id.partition(":")[0]
    assert rest.list_sessions().result().sessions == [session_id]
    assert rest.get_session(session_id).result().training_run_ids == [client.model_id]
    (served,) = rest.get_server_capabilities().result().supported_models
    assert (served.model_name, served.max_context_length) == ("cellgate/tiny", 2048)


def test_the_command_line_lists_and_deletes(
    gateway: RunningGateway, service: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = new_client(service)
    path = client.save_state("a").result().path
    monkeypatch.setenv("TINKER_BASE_URL", gateway.where.url)
    monkeypatch.setenv("TINKER_API_KEY", ALICE)

    def tinker_cli(*arguments: str) -> str:
        done = CliRunner().invoke(main_cli, ["--format", "json", *arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert path in tinker_cli("checkpoint", "list")
    tinker_cli("checkpoint", "set-ttl", path, "--ttl", "86400")
    tinker_cli("checkpoint", "set-ttl", path, "--remove")
    assert client.model_id in tinker_cli("run", "info", client.model_id)
    assert json.loads(tinker_cli("checkpoint", "delete", path, "-y"))["deleted_count"] == 1
    assert path not in tinker_cli("checkpoint", "list")
