"""Fine-tune an adapter on a text with the tinker SDK, saving on the way; run again with --resume to go on.

    export TINKER_BASE_URL=http://127.0.0.1:8787 TINKER_API_KEY=tml-…
    python examples/sft.py --steps 12 --save-every 3
    python examples/sft.py --steps 12 --save-every 3 --resume tinker://…/weights/step6

Every step prints `step <n> loss <mean loss per token>`; every save prints `saved <path>`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import tinker

TEXT = Path(__file__).parent / "data" / "alice.txt"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4, help="sequences per step")
    parser.add_argument("--length", type=int, default=48, help="tokens per sequence")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--resume", metavar="TINKER_PATH", help="a path that an earlier run printed")
    return parser.parse_args()


def read_sequences(tokens: list[int], length: int) -> list[tinker.Datum]:
    """The text cut into sequences of `length` tokens, each to predict its next token."""
    cut = [tokens[start : start + length + 1] for start in range(0, len(tokens) - length, length)]
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(piece[:-1]),
            loss_fn_inputs={"target_tokens": piece[1:], "weights": [1.0] * (len(piece) - 1)},
        )
        for piece in cut
    ]


def main() -> None:
    arguments = parse_arguments()
    service = tinker.ServiceClient()
    first = 0
    if arguments.resume:
        model = service.create_training_client_from_state_with_optimizer(arguments.resume).result()
        first = int(arguments.resume.rsplit("step", 1)[1])
    else:
        model = service.create_lora_training_client(base_model=arguments.base_model, rank=8, seed=0).result()
    sequences = read_sequences(model.get_tokenizer().encode(arguments.text.read_text()), arguments.length)
    adam = tinker.AdamParams(learning_rate=arguments.learning_rate, weight_decay=0.01, grad_clip_norm=1.0)
    for step in range(first, arguments.steps):
        start = step * arguments.batch
        batch = [sequences[(start + i) % len(sequences)] for i in range(arguments.batch)]
        forward_backward = model.forward_backward(batch, "cross_entropy")
        model.optim_step(adam)
        num_tokens = sum(len(datum.loss_fn_inputs["target_tokens"].data) for datum in batch)
        print(f"step {step} loss {forward_backward.result().metrics['loss:sum'] / num_tokens!r}", flush=True)
        if (step + 1) % arguments.save_every == 0:
            print(f"saved {model.save_state(f'step{step + 1}').result().path}", flush=True)
    service.close("success").result()


if __name__ == "__main__":
    main()
