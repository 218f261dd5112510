"""A checkpoint as a Hugging Face PEFT adapter: its weights as stored, and nothing else. Needs no torch.

adapter_model.safetensors   base_model.model.<module>.lora_A|B.weight, pairs only, the dtype as stored
adapter_config.json         what PEFT needs to put them on the base model, with its name
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer_cell.checkpoint.formats.stored import Stored
from trainer_cell.checkpoint.formats.target import write_file
from trainer_cell.vault.manifest import Manifest
from trainer_cell.vault.shard_layout import encode_header


def write_peft(directory: Path, stored: Stored) -> None:
    """Into an empty directory, durably. Raises `VaultError`."""
    tensors = stored.tensors(weights_only=True)
    header = encode_header([(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors])
    write_file(directory / "adapter_model.safetensors", header, *(tensor.data for tensor in tensors))
    config = json.dumps(_config(stored.manifest), indent=2, sort_keys=True) + "\n"
    write_file(directory / "adapter_config.json", config.encode())


def _config(manifest: Manifest) -> dict[str, Any]:
    alpha = manifest.adapter.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": manifest.base_model,
        "r": manifest.adapter.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": list(manifest.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
