"""`python -m …reference DIRECTORY MODEL…`: what transformers, peft and torch's AdamW make of a model.

For each MODEL, DIRECTORY/MODEL becomes a base model (unless it is one already) and DIRECTORY/MODEL.reference.pt the
record, with the adapter it began from in DIRECTORY/MODEL.initial.pt. Nothing of the cell is imported here.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from tests.trainer_cell.training.arithmetic import (
    ADAM,
    ALL_PROJECTIONS,
    ALPHA,
    RANK,
    Datum,
    Record,
    Step,
    Tensors,
    batches,
    initial,
)

_SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 160,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def configuration(model: str) -> PreTrainedConfig:
    """Each differs from `tiny` in what its name says; the odd vocabulary has no round factor."""
    small = {**_SMALL, "tie_word_embeddings": model in ("tied", "qwen2")}
    match model:
        case "tied":
            return LlamaConfig(**small)
        case "odd-vocabulary":
            return LlamaConfig(**{**small, "vocab_size": 509})
        case "llama3-rope":
            return LlamaConfig(**small, rope_parameters=_LLAMA3)
        case "qwen2":
            return Qwen2Config(**small)
        case "qwen3":
            return Qwen3Config(**small, head_dim=24)  # 8 heads of 24 are not 64
    raise ValueError(model)


def write_model(model: str, directory: Path) -> None:
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(configuration(model))
    for name, parameter in network.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            parameter.data.normal_(std=0.5)
    network.save_pretrained(directory)


def record(model: str, directory: Path) -> None:
    is_small = model != "smollm2"
    network = AutoModelForCausalLM.from_pretrained(directory / model, dtype=torch.float32, attn_implementation="sdpa")
    data = batches(network.config.vocab_size, *((3, (17, 5, 33, 2, 9, 64, 21)) if is_small else (1, (24, 7, 40))))
    with torch.no_grad():
        base_logits = [network(datum.tokens[None]).logits[0] for datum in data[0]]
    adapted = get_peft_model(
        network, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(ALL_PROJECTIONS), lora_dropout=0.0)
    )
    parameters = {
        name.replace(".default", ""): parameter
        for name, parameter in adapted.named_parameters()
        if parameter.requires_grad
    }
    began = initial({name: tuple(p.shape) for name, p in parameters.items()}, 0.05 if is_small else 0.01)
    for name, parameter in parameters.items():
        parameter.data.copy_(began[name])
    torch.save(began, directory / f"{model}.initial.pt")
    steps = train(adapted, parameters, data)
    torch.save(Record(base_logits, steps), directory / f"{model}.reference.pt")


def train(adapted: torch.nn.Module, parameters: Tensors, data: list[list[Datum]]) -> list[Step]:
    """One sequence at a time, nothing padded, nothing packed."""
    optimizer = torch.optim.AdamW(
        parameters.values(),
        lr=ADAM["learning_rate"],
        betas=(ADAM["beta1"], ADAM["beta2"]),
        eps=ADAM["eps"],
        weight_decay=ADAM["weight_decay"],
        foreach=False,
    )
    steps = []
    for batch in data:
        optimizer.zero_grad()
        logprobs = [
            torch.log_softmax(adapted(datum.tokens[None]).logits[0], -1).gather(-1, datum.targets[:, None])[:, 0]
            for datum in batch
        ]
        loss = -sum((datum.weights * said).sum() for datum, said in zip(batch, logprobs, strict=True))
        loss.backward()
        gradients = {name: parameter.grad.clone() for name, parameter in parameters.items()}
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), ADAM["grad_clip_norm"])
        optimizer.step()
        states = {name: optimizer.state[parameter] for name, parameter in parameters.items()}
        steps.append(
            Step(
                [said.detach() for said in logprobs],
                float(loss.detach()),
                gradients,
                float(norm),
                {name: state["exp_avg"].clone() for name, state in states.items()},
                {name: state["exp_avg_sq"].clone() for name, state in states.items()},
                {name: parameter.detach().clone() for name, parameter in parameters.items()},
            )
        )
    return steps


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    for one in sys.argv[2:]:
        if not (where / one).exists():
            write_model(one, where / one)
        record(one, where)
