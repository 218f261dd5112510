"""A cell without a GPU neither compiles nor imports what could."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="megatron-core compiles for a GPU")


def imports_the_compiler(module: str) -> bool:
    told = f"import sys, {module}; print('torch._inductor' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", told], capture_output=True, text=True, check=True)
    return done.stdout.split()[-1] == "True"


def test_a_rank_starts_without_the_compiler() -> None:
    assert not imports_the_compiler("trainer_cell.assembly")


def test_megatron_core_alone_would_import_it() -> None:
    """The control."""
    assert imports_the_compiler("megatron.core.models.gpt")
