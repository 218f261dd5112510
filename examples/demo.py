"""What cellgate is for, in a few minutes: the same fine-tuning twice, once undisturbed, once with everything killed.

Starts a service of its own, runs `sft.py` to the end, runs it again and sends SIGKILL to service and client after a
save in the middle, starts both again from that save, and prints the losses side by side: they are the same numbers.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

KEY = "tml-demo"
SFT = Path(__file__).with_name("sft.py")
Losses = dict[int, float]


class Service:
    """`cellgate serve` in a process group of its own."""

    def __init__(self, state: Path, base_model: str) -> None:
        command = [sys.executable, "-m", "gateway.cli", "serve", "--state", str(state), "--port", "0"]
        command += ["--base-model", base_model, "--api-key", f"{KEY}=demo"]
        log = (state / "serve.log").open("a")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("cellgate ready "):
                self.url = line.split()[-1]
                return
        raise SystemExit(f"the service did not start; its log is {state / 'serve.log'}")

    def end(self, number: int) -> None:
        """Once or more often."""
        if self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(signal.SIGTERM)


def run_sft(service: Service, arguments: list[str], kill_after: str | None = None) -> tuple[Losses, str]:
    """Run the client; returns its losses by step and its last save. Kills it when it has saved `kill_after`."""
    environment = os.environ | {"TINKER_BASE_URL": service.url, "TINKER_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
    client = subprocess.Popen(
        [sys.executable, str(SFT), *arguments], stdout=subprocess.PIPE, text=True, env=environment
    )
    losses: Losses = {}
    saved = ""
    assert client.stdout is not None
    for line in client.stdout:
        print("   ", line, end="", flush=True)
        match line.split():
            case ["step", step, "loss", loss]:
                losses[int(step)] = float(loss)
            case ["saved", path]:
                saved = path
                if kill_after is not None and path.endswith(kill_after):
                    client.kill()
    status = client.wait()
    if status != (-signal.SIGKILL if kill_after else 0):
        raise SystemExit(f"the client ended with status {status}")
    return losses, saved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=12)
    steps = parser.parse_args().steps
    base_model = parser.parse_args().base_model
    arguments = ["--base-model", base_model, "--steps", str(steps), "--save-every", str(steps // 2)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what is started is ended on the way out
    with tempfile.TemporaryDirectory(prefix="cellgate-demo-") as directory:
        state = Path(directory)
        with Service(state, base_model) as service:
            print("undisturbed:")
            undisturbed, _ = run_sft(service, arguments)
            print(f"again, with SIGKILL to service and client after step {steps // 2 - 1}:")
            interrupted, saved = run_sft(service, arguments, kill_after=f"step{steps // 2}")
            service.end(signal.SIGKILL)
        with Service(state, base_model) as service:
            print(f"started again, resumed from {saved}:")
            resumed, _ = run_sft(service, [*arguments, "--resume", saved])
    report(undisturbed, interrupted | resumed, steps)


def report(undisturbed: Losses, interrupted: Losses, steps: int) -> None:
    print(f"\n{'step':>4}  {'undisturbed':>20}  {'killed and resumed':>20}")
    for step in range(steps):
        marks = "equal" if undisturbed[step] == interrupted[step] else "DIFFERENT"
        print(f"{step:>4}  {undisturbed[step]!r:>20}  {interrupted[step]!r:>20}  {marks}")
    print(f"loss per token fell from {undisturbed[0]:.3f} to {undisturbed[steps - 1]:.3f}")
    if undisturbed != interrupted:
        raise SystemExit("the interrupted run differs from the undisturbed one")


if __name__ == "__main__":
    main()
