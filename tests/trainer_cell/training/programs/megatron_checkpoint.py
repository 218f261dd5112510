"""Saves a base model as Megatron itself does: an unmodified GPTModel's sharded state, by `dist_checkpointing`.

    [torchrun …] -m tests.trainer_cell.training.programs.megatron_checkpoint BASE INTO TP PP PADDING

BASE: a prepared directory. The vocabulary is padded by PADDING rows for each tensor-parallel rank.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

WITH_VOCABULARY = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
}


def main(base: Path, into: Path, tensor: int, pipeline: int, padding: int) -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from trainer_cell.protocol.outcomes import Layout
    from trainer_cell.training.build import build_base, start_parallel

    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")
    layout = Layout(world, tensor, pipeline, world // tensor // pipeline)
    start_parallel(layout)
    ours = build_base(base, layout, torch.device("cpu"), torch.float32)
    weights = dict(ours.model.named_parameters())
    vocab = -(-ours.shape.vocab // tensor) * tensor + padding * tensor
    theirs = GPTModel(
        config=ours.model.config,
        transformer_layer_spec=get_gpt_layer_local_spec(qk_layernorm=ours.shape.qk_norm, normalization="RMSNorm"),
        vocab_size=vocab,
        max_sequence_length=ours.shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=ours.shape.tied,
    )
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name in WITH_VOCABULARY:
                whole = load_file(base / "model.safetensors")[WITH_VOCABULARY[name]]
                rank = parallel_state.get_tensor_model_parallel_rank()
                size = parameter.size(0)
                # The rows beyond the vocabulary are the last ones of all ranks together, and hold anything.
                rows = torch.cat([whole, torch.ones(vocab - len(whole), whole.size(1))])
                parameter.copy_(rows[rank * size : (rank + 1) * size])
            else:
                parameter.copy_(weights[name])
    if dist.get_rank() == 0:
        into.mkdir(parents=True)
    dist.barrier()
    # As in training, an optimizer's state lies beside the weights.
    state: dict[str, Any] = {"model": theirs.sharded_state_dict(), "iteration": 7, "args": {"seq_length": 8}}
    dist_checkpointing.save(state, str(into))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *(int(argument) for argument in sys.argv[3:]))
