"""The `cellgate` command: options, exit statuses, and what it says of checkpoints on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.cli import main
from tests.trainer_cell.vault.checkpoints import ADDRESS, new_vault, save
from tests.trainer_cell.vault.scenes import MODEL, damage, named, state, version_of
from trainer_cell.vault.layout import CheckpointAddress
from trainer_cell.vault.listing import list_checkpoints
from trainer_cell.vault.quarantine import list_quarantined
from trainer_cell.vault.retention_record import RetentionRecord, write_records
from trainer_cell.vault.startup import recover


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
    for given in (str(version), ADDRESS.uri):
        assert run("checkpoints", "verify", "--deep", given, "--checkpoints", str(tmp_path)) == 1
        assert shard.name in capsys.readouterr().out


def test_verify_all_looks_at_recovery_snapshots_and_a_listing_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vault = new_vault(tmp_path)
    save(vault)
    latest = CheckpointAddress(MODEL, "recovery", "latest")
    damage(vault, save(vault, latest))
    main(["checkpoints", "list", "--checkpoints", str(tmp_path)])
    assert latest.uri not in capsys.readouterr().out
    assert run("checkpoints", "verify", "--all", "--checkpoints", str(tmp_path)) == 1
    told = capsys.readouterr().out
    assert f"{latest.uri}: " in told
    assert "2 checked, 1 damaged" in told


def test_verify_wants_paths_or_all_and_not_both(tmp_path: Path) -> None:
    assert run("checkpoints", "verify", "--checkpoints", str(tmp_path)) == 1
    assert run("checkpoints", "verify", "--all", str(tmp_path), "--checkpoints", str(tmp_path)) == 1


def test_what_is_not_there_is_told_apart_from_what_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = "tinker://model/weights/absent"
    assert run("checkpoints", "verify", absent, "tinker://oops", "--checkpoints", str(tmp_path)) == 1
    told = capsys.readouterr().out
    assert f"{absent}: " in told
    assert "0 checked, 0 damaged, 2 not found" in told


def test_a_listing_tells_step_size_times_pin_and_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vault = new_vault(tmp_path)
    save(vault, named("plain"))
    save(vault, named("expired"), expires="2026-01-01T00:00:00Z")
    told = save(vault, named("repaired"))
    write_records(vault, MODEL, {version_of(told): RetentionRecord(pinned=True, note="repaired at a start")})
    damage(vault, save(vault, named("damaged")))
    main(["checkpoints", "list", "--checkpoints", str(tmp_path)])
    lines = {line.split("\t")[0].rpartition("/")[2]: line.split("\t") for line in capsys.readouterr().out.splitlines()}
    size = lines["plain"][2]
    assert lines["plain"][1:] == ["step 4", size, "2025-11-30T12:00:00Z", "never", "-", "with optimizer"]
    assert lines["expired"][4:] == ["2026-01-01T00:00:00.000Z", "-", "expired"]
    assert lines["repaired"][5:] == ["pinned", "with optimizer; repaired at a start"]
    assert lines["damaged"][6] == "damaged: file rank00001.safetensors is missing"


def test_gc_tells_what_would_go_and_why_and_then_does_just_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vault = new_vault(tmp_path)
    for seed in (1, 2):
        save(vault, named("replaced"), seed=seed, overwrite=True)
    save(vault, named("expired"), expires="2026-01-01T00:00:00Z")
    for name in ("dropped", "kept", "last"):
        save(vault, named(name))
    before = state(tmp_path)
    rules = ["--keep-last", "2", "--checkpoints", str(tmp_path)]
    assert run("checkpoints", "gc", "--dry-run", *rules) == 0
    told = capsys.readouterr().out.splitlines()
    assert state(tmp_path) == before
    reasons = sorted((line.split("\t")[0].rpartition("/")[2], line.split("\t")[3]) for line in told[:-1])
    assert reasons == [
        ("dropped", "not_kept"),
        ("expired", "expired"),
        ("replaced", "not_kept"),
        ("replaced", "not_kept"),
    ]
    assert told[-1].startswith("4 would be removed, ")
    assert run("checkpoints", "gc", *rules) == 0
    done = capsys.readouterr().out.splitlines()
    assert sorted(done[:-1]) == sorted(told[:-1])
    assert sorted(listed.address.name for listed in list_checkpoints(vault)) == ["kept", "last"]


def test_gc_is_refused_while_a_service_holds_the_root_and_a_dry_run_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vault = new_vault(tmp_path)
    save(vault, named("expired"), expires="2026-01-01T00:00:00Z")
    with vault.lock():
        assert run("checkpoints", "gc", "--dry-run", "--checkpoints", str(tmp_path)) == 0
        assert run("checkpoints", "gc", "--checkpoints", str(tmp_path)) == 1
        assert len(list(list_checkpoints(vault))) == 1
    assert run("checkpoints", "gc", "--checkpoints", str(tmp_path)) == 0
    assert list(list_checkpoints(vault)) == []


def test_single_checkpoints_are_pinned_and_deleted_also_while_a_service_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vault = new_vault(tmp_path)
    save(vault)
    root = ["--checkpoints", str(tmp_path)]
    with vault.lock():
        main(["checkpoints", "pin", ADDRESS.uri, *root])
        assert run("checkpoints", "delete", ADDRESS.uri, *root) == 1
        main(["checkpoints", "unpin", ADDRESS.uri, *root])
        main(["checkpoints", "delete", ADDRESS.uri, *root])
    assert [line.rpartition(" ")[2] for line in capsys.readouterr().out.splitlines()] == [
        "pinned",
        "unpinned",
        "deleted",
    ]
    for command in ("pin", "unpin", "delete"):
        assert run("checkpoints", command, ADDRESS.uri, *root) == 1
        assert run("checkpoints", command, "tinker://oops", *root) == 1


def test_quarantine_is_listed_and_emptied_only_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vault = new_vault(tmp_path)
    damage(vault, save(vault))
    recover(vault)
    root = ["--checkpoints", str(tmp_path)]
    assert run("checkpoints", "gc", *root) == 0
    capsys.readouterr()
    main(["checkpoints", "list", "--quarantined", *root])
    assert ".quarantine" in capsys.readouterr().out
    assert run("checkpoints", "gc", "--quarantined", "--dry-run", *root) == 0
    assert len(list(list_quarantined(vault))) == 1
    assert run("checkpoints", "gc", "--quarantined", *root) == 0
    assert list(list_quarantined(vault)) == []


def test_commands_on_a_root_that_is_not_there_end_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["gc"], ["gc", "--dry-run"], ["delete", ADDRESS.uri], ["pin", ADDRESS.uri]):
        assert run("checkpoints", *command, "--checkpoints", str(tmp_path / "none")) == 1
    assert not (tmp_path / "none").exists()
