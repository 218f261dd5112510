"""What `make check` runs holds here too: one set of tests says whether the tree is good."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> str:
    """What the tool said; fails the test when it found something."""
    bin_directory = Path(sys.executable).parent
    program, *arguments = command
    done = subprocess.run(
        [bin_directory / program, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("command", ["ruff format --check .", "ruff check .", "mypy"])
def test_the_tree_is_formatted_linted_and_typed(command: str) -> None:
    run(*command.split())


@pytest.mark.parametrize("module", ["openapi.generate", "openapi.export"])
def test_what_is_generated_is_up_to_date(module: str) -> None:
    run("python", "-m", module, "--check")
