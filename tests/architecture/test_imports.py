"""Imports run one way: the contracts in pyproject.toml hold, and the gateway does without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gateway", "trainer_cell")


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("lint-imports")
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(
        [program, "--no-cache"], cwd=root, env=environment, capture_output=True, text=True, check=False
    )


def test_the_import_contracts_hold() -> None:
    checked = lint_imports(ROOT)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_gateway_is_kept_from_every_part_of_the_cell_but_protocol_and_vault() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    [contract] = [contract for contract in contracts if contract.get("source_modules") == ["gateway"]]
    parts = {path.stem for path in (ROOT / "trainer_cell").iterdir()} - {"__init__", "__pycache__"}
    allowed = {f"trainer_cell.{part}" for part in parts} - set(contract["forbidden_modules"])
    assert allowed == {"trainer_cell.protocol", "trainer_cell.vault"}


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("trainer_cell/protocol/errors.py", "import torch"),
        ("trainer_cell/vault/layout.py", "import numpy"),
        ("gateway/scheduling/errors.py", "import gateway.http.errors"),
        ("gateway/store/writer.py", "import gateway.scheduling.errors"),
        ("trainer_cell/ranks.py", "import httpx"),
        ("gateway/settings.py", "import trainer_cell.settings"),
    ],
    ids=lambda value: value.rpartition("/")[2].replace(" ", "_"),
)
def test_an_arrow_in_the_wrong_direction_breaks_a_contract(tmp_path: Path, module: str, line: str) -> None:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / module).open("a") as source:
        source.write(f"\n{line}\n")
    checked = lint_imports(tmp_path)
    assert checked.returncode == 1, checked.stdout + checked.stderr
    assert "BROKEN" in checked.stdout


IMPORT_ALL = """
import importlib, importlib.abc, pkgutil, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "megatron", "transformers", "peft", "numpy", "psutil"}:
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

sys.meta_path.insert(0, Absent())
for root in sys.argv[1:]:
    package = importlib.import_module(root)
    for found in pkgutil.walk_packages(package.__path__, f"{root}."):
        importlib.import_module(found.name)
"""


def import_all(*packages: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", IMPORT_ALL, *packages]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_gateway_protocol_and_vault_import_where_torch_is_not_installed() -> None:
    imported = import_all("gateway", "trainer_cell.protocol", "trainer_cell.vault")
    assert imported.returncode == 0, imported.stderr


def test_the_training_code_does_not() -> None:
    imported = import_all("trainer_cell.training")
    assert "is not installed here" in imported.stderr
