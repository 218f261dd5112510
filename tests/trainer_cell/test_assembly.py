from __future__ import annotations

from pathlib import Path

import pytest
from pydantic_settings import CliApp

from trainer_cell.settings import CellSettings

pytestmark = pytest.mark.cell


@pytest.mark.parametrize(("world", "layout"), [(2, ["--tp", "3"]), (3, ["--tp", "2"]), (4, ["--tp", "2", "--pp", "3"])])
def test_ranks_that_make_no_layout_are_told_by_the_first_rank_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, world: int, layout: list[str]
) -> None:
    from trainer_cell.assembly import CannotStart, run_cell

    given = ["--base-model", "tiny", "--gateway-socket", str(tmp_path / "socket"), "--checkpoints", str(tmp_path)]
    settings = CliApp.run(CellSettings, cli_args=[*given, *layout])
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(CannotStart, match=f"{world} ranks cannot be split into tp {settings.tp} × pp {settings.pp}"):
        run_cell(settings)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended:
        run_cell(settings)
    assert ended.value.code == 1
