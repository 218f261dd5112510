"""Writes PEFT adapters with the files and settings that `peft` itself writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import save_file

from trainer_cell.checkpoint.formats.foreign import Foreign
from trainer_cell.training.adapter_names import target_modules


def config_of(foreign: Foreign, **changes: Any) -> dict[str, Any]:
    """As `LoraConfig.save_pretrained` has it, changed as told."""
    config = LoraConfig(
        r=foreign.spec.rank,
        lora_alpha=int(foreign.spec.alpha),
        target_modules=list(target_modules(foreign.spec)),
        task_type="CAUSAL_LM",
        base_model_name_or_path="cellgate/tiny",
    ).to_dict()
    config["target_modules"] = sorted(config["target_modules"])
    return {**config, "peft_type": "LORA", **changes}


def write_peft_files(directory: Path, foreign: Foreign, pickled: bool = False, **changes: Any) -> None:
    directory.mkdir()
    weights = {name: tensor.clone() for name, tensor in foreign.parts["weight"].items()}
    if pickled:
        torch.save(weights, directory / "adapter_model.bin")
    else:
        save_file(weights, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_config.json").write_text(json.dumps(config_of(foreign, **changes)))
