"""`python -m trainer_cell.checkpoint.formats import|export …`: one checkpoint in, or out.

What became of it is the last line of stdout: for people, or with `--json` an object with what `run.Imported` tells, or
with `kind` and `message` of the refusal. Without `--json` a refusal is one line on stderr. The exit status is 0, or 1
for a refusal, or 2 for options that cannot be used.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
import warnings
from pathlib import Path

from trainer_cell.checkpoint.formats.errors import FormatRefused
from trainer_cell.checkpoint.formats.run import Imported, ImportJob, run_export, run_import
from trainer_cell.protocol.commands import ByteQuota
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.training.base_models import BaseUnavailable, default_cache
from trainer_cell.training.model_shape import UnsupportedBase
from trainer_cell.training.safetensors_files import DamagedBase
from trainer_cell.vault import errors as vault_errors
from trainer_cell.vault.layout import CheckpointAddress, InvalidAddress

_KINDS: tuple[tuple[type[Exception], ErrorKind], ...] = (
    (InvalidAddress, ErrorKind.BAD_COMMAND),
    (vault_errors.CheckpointExists, ErrorKind.CHECKPOINT_EXISTS),
    (vault_errors.UnsupportedFormat, ErrorKind.CHECKPOINT_INCOMPATIBLE),
    (vault_errors.CheckpointDamaged, ErrorKind.CHECKPOINT_CORRUPT),
    (vault_errors.VaultError, ErrorKind.STORAGE_FAILED),
    (UnsupportedBase, ErrorKind.CHECKPOINT_INCOMPATIBLE),
    (BaseUnavailable, ErrorKind.CHECKPOINT_INCOMPATIBLE),
    (DamagedBase, ErrorKind.CHECKPOINT_INCOMPATIBLE),
    (OSError, ErrorKind.STORAGE_FAILED),
)


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    # What megatron-core and torch have to say of kernels and devices that are not there is no news here.
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    try:
        said, told = _import(options) if options.command == "import" else _export(options)
    except (FormatRefused, CommandFailed) as refused:
        return _refuse(options, refused.kind, str(refused))
    except tuple(kind for kind, _ in _KINDS) as error:
        kind = next(kind for of_error, kind in _KINDS if isinstance(error, of_error))
        return _refuse(options, kind, str(error))
    _say(json.dumps(told) if options.json else said)
    return 0


def _import(options: argparse.Namespace) -> tuple[str, dict[str, object]]:
    imported = run_import(
        ImportJob(
            source=options.source,
            format=options.format,
            base_model=options.base_model,
            cache=options.cache,
            root=options.checkpoints,
            address=CheckpointAddress(options.model_id, "weights", options.name),
            overwrite=options.overwrite,
            tenant_digest=options.tenant_digest,
            alpha=options.alpha,
            with_optimizer=not (options.weights_only or options.no_load_optim),
            trust_pickle=options.trust_pickle,
            within=options.within,
            quota=None if options.quota is None else ByteQuota(*options.quota),
            iteration=options.iteration,
            weights=options.weights,
            command_id=options.command_id,
        )
    )
    if not options.json:
        for remark in imported.remarks:
            sys.stderr.write(f"cellgate: {remark}\n")
    return _sentence(imported), dataclasses.asdict(imported)


def _sentence(imported: Imported) -> str:
    optimizer = "with" if imported.has_optimizer else "without"
    scheduler = ", with its scheduler" if imported.has_scheduler else ""
    return (
        f"{imported.uri}\timported from {imported.format}: iteration {imported.iteration}, step {imported.step}, "
        f"{optimizer} optimizer{scheduler}, {imported.size_bytes} bytes"
    )


def _export(options: argparse.Namespace) -> tuple[str, dict[str, object]]:
    manifest = run_export(options.checkpoint, options.checkpoints, options.format, options.to)
    told: dict[str, object] = {"to": str(options.to), "format": options.format, "step": manifest.step}
    return f"{options.to}\texported as {options.format}: iteration {manifest.iteration}, step {manifest.step}", told


def _refuse(options: argparse.Namespace, kind: ErrorKind, message: str) -> int:
    line = " ".join(message.split())
    if options.json:
        _say(json.dumps({"kind": kind.value, "message": line}))
    else:
        sys.stderr.write(f"cellgate: {line}\n")
    return 1


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="formats", description="Import or export one checkpoint.")
    commands = parser.add_subparsers(dest="command", required=True)
    imports = commands.add_parser("import")
    imports.add_argument("source", type=Path)
    imports.add_argument("--format", choices=("native", "torch_dist", "peft"))
    imports.add_argument("--model-id", required=True)
    imports.add_argument("--name", required=True)
    imports.add_argument("--base-model", required=True)
    imports.add_argument("--tenant-digest", required=True)
    imports.add_argument("--cache", type=Path, default=default_cache())
    imports.add_argument("--alpha", type=float)
    imports.add_argument("--within", type=Path)
    imports.add_argument("--iteration", type=int, default=0)
    imports.add_argument("--weights", type=Path)
    imports.add_argument("--command-id")
    imports.add_argument("--quota", type=int, nargs=2, metavar=("USED", "LIMIT"))
    for switch in ("--overwrite", "--weights-only", "--no-load-optim", "--trust-pickle"):
        imports.add_argument(switch, action="store_true")
    exports = commands.add_parser("export")
    exports.add_argument("checkpoint")
    exports.add_argument("--format", choices=("peft", "torch_dist"), required=True)
    exports.add_argument("--to", type=Path, required=True)
    for command in (imports, exports):
        command.add_argument("--checkpoints", type=Path, required=True)
        command.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
