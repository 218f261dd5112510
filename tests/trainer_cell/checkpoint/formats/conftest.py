from __future__ import annotations

from pathlib import Path

import pytest

from trainer_cell.training.base_models import prepare
from trainer_cell.training.model_shape import ModelShape, read_shape


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare("tiny", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def shape(tiny: Path) -> ModelShape:
    return read_shape(tiny)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoint root."""
    return tmp_path / "checkpoints"
