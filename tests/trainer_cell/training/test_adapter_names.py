"""What an import expects of an adapter is what an adapter of the cell has."""

from __future__ import annotations

from trainer_cell.checkpoint.formats.foreign import features_of, shapes_of
from trainer_cell.protocol.commands import AdapterSpec
from trainer_cell.training.adapter import Adapter
from trainer_cell.training.build import Base


def test_imports_and_adapters_agree_on_names_shapes_and_order(base: Base) -> None:
    spec = AdapterSpec(3, 6.0, train_attn=True, train_mlp=True, train_unembed=True)
    features = features_of(base.shape)
    assert list(features.items()) == list(base.features.items())
    assert list(shapes_of(features, spec).items()) == list(Adapter(base, spec).whole.items())
