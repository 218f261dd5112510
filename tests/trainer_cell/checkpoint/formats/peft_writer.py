"""Writes PEFT adapters with the files and settings that `peft` itself writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trainer_cell.checkpoint.formats.foreign import Foreign
from trainer_cell.training.adapter_names import target_modules


def config_of(foreign: Foreign, **changes: Any) -> dict[str, Any]:
    """As `save_pretrained` of peft 0.21 has it, changed as told."""
    unset = dict.fromkeys(
        (
            *(
                "auto_mapping",
                "revision",
                "exclude_modules",
                "modules_to_save",
                "layers_to_transform",
                "layers_pattern",
            ),
            *("megatron_config", "trainable_token_indices", "eva_config", "corda_config", "lora_ga_config"),
            *("velora_config", "alora_invocation_tokens", "monteclora_config", "layer_replication"),
            *("target_parameters", "use_bdlora", "arrow_config", "kasa_config"),
        )
    )
    off = dict.fromkeys(
        ("fan_in_fan_out", "use_rslora", "use_dora", "use_qalora", "lora_bias", "ensure_weight_tying"), False
    )
    return {
        **unset,
        **off,
        "task_type": "CAUSAL_LM",
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "base_model_name_or_path": "cellgate/tiny",
        "inference_mode": True,
        "r": foreign.spec.rank,
        "lora_alpha": foreign.spec.alpha,
        "target_modules": sorted(target_modules(foreign.spec)),
        "lora_dropout": 0.0,
        "bias": "none",
        "init_lora_weights": True,
        "rank_pattern": {},
        "alpha_pattern": {},
        "megatron_core": "megatron.core",
        "loftq_config": {},
        "qalora_group_size": 16,
        **changes,
    }


def write_peft_files(directory: Path, foreign: Foreign, pickled: bool = False, **changes: Any) -> None:
    directory.mkdir()
    weights = {name: tensor.clone() for name, tensor in foreign.parts["weight"].items()}
    if pickled:
        torch.save(weights, directory / "adapter_model.bin")
    else:
        save_file(weights, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_config.json").write_text(json.dumps(config_of(foreign, **changes)))
