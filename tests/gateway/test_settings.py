from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from pydantic_settings import CliApp

from gateway.settings import ServeSettings, split_api_key


def parsed(*arguments: str) -> ServeSettings:
    return CliApp.run(ServeSettings, cli_args=list(arguments))


def test_the_command_line_wins_over_the_environment_and_that_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed().port == 8787
    monkeypatch.setenv("CELLGATE_PORT", "9001")
    assert parsed().port == 9001
    assert parsed("--port", "0").port == 0


def test_state_lies_in_the_users_state_directory_and_checkpoints_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/somewhere")
    assert parsed().state == Path("/somewhere/cellgate")
    assert parsed().checkpoint_root == Path("/somewhere/cellgate/checkpoints")
    assert parsed("--checkpoints", "/big/disk").checkpoint_root == Path("/big/disk")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert parsed().state == Path.home() / ".local/state/cellgate"
    monkeypatch.setenv("XDG_STATE_HOME", "not/absolute")
    assert parsed().state == Path.home() / ".local/state/cellgate"


def test_paths_do_not_depend_on_where_the_children_are_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    settings = parsed("--state", "here", "--cache", "~/there")
    assert (settings.state, settings.cache) == (tmp_path / "here", Path.home() / "there")


def test_an_api_key_may_be_given_several_times_and_in_one_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"tml-a": "alice", "tml-b": "bob"}
    assert parsed("--api-key", "tml-a=alice", "--api-key", "tml-b=bob").api_keys == keys
    monkeypatch.setenv("CELLGATE_API_KEY", "tml-a=alice,tml-b=bob")
    assert parsed().api_keys == keys


def test_two_keys_may_be_of_one_tenant_but_one_key_not_of_two() -> None:
    assert set(parsed("--api-key", "tml-a=alice", "--api-key", "tml-b=alice").api_keys.values()) == {"alice"}
    with pytest.raises(ValidationError, match="two tenants"):
        parsed("--api-key", "tml-a=alice", "--api-key", "tml-a=bob")


@pytest.mark.parametrize("pair", ["tml-a", "a=alice", "tml-=alice", "tml-a=", "tml-a=al ice", "tml-a b=alice", "=x"])
def test_a_malformed_api_key_is_refused(pair: str) -> None:
    with pytest.raises(ValueError, match=r"KEY=TENANT|must start with|no tenant name"):
        split_api_key(pair)


def test_secrets_show_neither_in_errors_nor_in_what_is_printed() -> None:
    with pytest.raises(ValidationError) as refused:
        parsed("--api-key", "sk-secret=alice")
    assert "sk-secret" not in str(refused.value)
    settings = parsed("--api-key", "tml-secret=alice")
    assert settings.shown()["api_key"] == ["tml-********=alice"]
    assert "tml-secret" not in repr(settings)


@pytest.mark.parametrize(
    "arguments",
    [["--port", "65536"], ["--slots", "0"], ["--ranks", "0"], ["--dtype", "fp16"], ["--max-lora-rank", "-1"]],
    ids=lambda arguments: " ".join(arguments),
)
def test_a_value_that_cannot_work_is_refused(arguments: list[str]) -> None:
    with pytest.raises(ValidationError):
        parsed(*arguments)


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        (["--ranks", "3", "--tp", "2"], "3 ranks cannot be split into tp 2 × pp 1"),
        (["--ranks", "2", "--tp", "2", "--pp", "2"], "2 ranks cannot be split into tp 2 × pp 2"),
        (["--pp", "2"], "1 ranks cannot be split into tp 1 × pp 2"),
        (["--tp", "0"], "greater than or equal to 1"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_ranks_that_make_no_layout_are_refused_with_the_reason(layout: list[str], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        parsed(*layout)
    assert parsed("--ranks", "4", "--tp", "2").pp == 1


def test_settings_cannot_be_changed_after_they_were_read() -> None:
    with pytest.raises(ValidationError):
        parsed().port = 1


def test_determinism_is_the_cells_to_decide_unless_told() -> None:
    assert parsed().deterministic is None
    assert parsed("--deterministic").deterministic is True
    assert parsed("--no-deterministic").deterministic is False
