"""A small base model whose vocabulary no layout divides evenly, its output layer tied to its embedding."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.numpy import load_file, save_file

from trainer_cell.training import tiny_base

# Over four tensor-parallel ranks: 3, 3, 3 and none at all.
VOCAB = 9


def write(directory: Path) -> Path:
    """Fill a new directory."""
    directory.mkdir()
    tiny_base.write(directory)
    weights = load_file(directory / "model.safetensors")
    del weights["lm_head.weight"]
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:VOCAB].copy()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = {**tiny_base.CONFIG, "vocab_size": VOCAB, "tie_word_embeddings": True}
    (directory / "config.json").write_text(json.dumps(config))
    return directory
