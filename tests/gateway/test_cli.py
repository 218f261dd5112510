"""The `cellgate` command: options, exit statuses, and what it says of checkpoints on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.cli import main
from tests.trainer_cell.vault.checkpoints import ADDRESS, new_vault, save


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code if isinstance(ended.value.code, int) else 1


def test_config_prints_what_is_in_force_with_secrets_masked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CELLGATE_API_KEY", "tml-secret=alice")
    # Also the name of a subcommand.
    monkeypatch.setenv("CELLGATE_CHECKPOINTS", str(tmp_path / "disk"))
    main(["config", "--slots", "5", "--state", str(tmp_path)])
    told = capsys.readouterr().out
    shown = json.loads(told)
    assert (shown["slots"], shown["checkpoints"], shown["port"]) == (5, str(tmp_path / "disk"), 8787)
    assert shown["api_key"] == ["tml-********=alice"]
    assert "tml-secret" not in told


@pytest.mark.parametrize("arguments", [["serve", "--port", "x"], ["serve", "--sl0ts", "1"], ["no-such-command"]])
def test_what_cannot_be_understood_ends_with_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert capsys.readouterr().err.strip()


def test_a_refused_key_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--api-key", "sk-secret=alice") == 2
    told = capsys.readouterr().err
    assert "--api-key" in told
    assert "sk-secret" not in told


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out.startswith("cellgate ")


def test_checkpoints_are_listed_and_verified_from_the_files_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vault = new_vault(tmp_path)
    version = vault.version_dir(save(vault))
    main(["checkpoints", "list", "--checkpoints", str(tmp_path)])
    assert capsys.readouterr().out.startswith(f"{ADDRESS.uri}\t")
    assert run("checkpoints", "verify", "--deep", "--all", "--checkpoints", str(tmp_path)) == 0
    assert run("checkpoints", "verify", str(version), "--checkpoints", str(tmp_path)) == 0

    shard = next(version.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.chmod(0o600)
    shard.write_bytes(content)
    assert run("checkpoints", "verify", "--all", "--checkpoints", str(tmp_path)) == 0, "sizes alone do not show it"
    capsys.readouterr()
    for named in (str(version), ADDRESS.uri):
        assert run("checkpoints", "verify", "--deep", named, "--checkpoints", str(tmp_path)) == 1
        assert shard.name in capsys.readouterr().out


def test_verify_wants_paths_or_all_and_not_both(tmp_path: Path) -> None:
    assert run("checkpoints", "verify", "--checkpoints", str(tmp_path)) == 1
    assert run("checkpoints", "verify", "--all", str(tmp_path), "--checkpoints", str(tmp_path)) == 1


def test_what_is_no_checkpoint_is_told_as_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absent = "tinker://model/weights/absent"
    assert run("checkpoints", "verify", absent, "tinker://oops", "--checkpoints", str(tmp_path)) == 1
    told = capsys.readouterr().out
    assert f"{absent}: " in told
    assert "2 checked, 2 damaged" in told
