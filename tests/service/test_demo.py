"""`make demo`: a real pretrained model, or a tiny one, on a real text, with everything killed in the middle."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.cell
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("base_model", "fall"), [("tiny", 0.0), pytest.param("smollm2-135m", 0.5, marks=pytest.mark.full)]
)
def test_the_demo_resumes_with_equal_losses_that_fall(base_model: str, fall: float) -> None:
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--steps", "6", "--base-model", base_model]
    demo = subprocess.run(command, capture_output=True, text=True)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    rows = re.findall(r"^ +(\d) +([\d.]+) +([\d.]+)  (\w+)$", demo.stdout, re.MULTILINE)
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4", "5"]
    assert all(undisturbed == resumed and mark == "equal" for _, undisturbed, resumed, mark in rows)
    assert float(rows[-1][1]) < float(rows[0][1]) - fall
