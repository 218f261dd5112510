"""Why a checkpoint of another format is not imported, or one of ours not exported. Nothing has been changed then.

FormatRefused
├── UnknownFormat        what lies there is of no format that is read
├── SourceDamaged        a file or tensor is missing, partial, empty, or no such file
├── UnsafePickle         a file would run code when it is unpickled
├── NonFinite            a tensor holds NaN or infinity
├── Incompatible         names, shapes or settings are not those of an adapter over this base model
│   └── OptimizerDoesNotMap   ... its optimizer's are not, while its weights are
├── OutsideAllowed       a path leads out of the directory that imports are confined to
├── TargetExists         an export's directory is there already
└── NotExportable        the checkpoint cannot be written in the format asked for
"""

from __future__ import annotations

from collections.abc import Iterable

from trainer_cell.protocol.errors import ErrorKind


class FormatRefused(Exception):
    """The message is one line, for people, and names the file, tensor or field; `kind` is the contract."""

    kind = ErrorKind.CHECKPOINT_INCOMPATIBLE


class UnknownFormat(FormatRefused):
    kind = ErrorKind.CHECKPOINT_NOT_FOUND


class SourceDamaged(FormatRefused):
    kind = ErrorKind.CHECKPOINT_CORRUPT


class UnsafePickle(FormatRefused):
    pass


class NonFinite(FormatRefused):
    kind = ErrorKind.NON_FINITE_STATE


class Incompatible(FormatRefused):
    pass


class OptimizerDoesNotMap(Incompatible):
    pass


class OutsideAllowed(FormatRefused):
    kind = ErrorKind.BAD_COMMAND


class TargetExists(FormatRefused):
    kind = ErrorKind.CHECKPOINT_EXISTS


class NotExportable(FormatRefused):
    pass


_MOST_TOLD = 5


def told(items: Iterable[object]) -> str:
    """The first few, comma-separated, and how many more there are."""
    all_items = list(items)
    shown = ", ".join(str(item) for item in all_items[:_MOST_TOLD])
    return shown if len(all_items) <= _MOST_TOLD else f"{shown} and {len(all_items) - _MOST_TOLD} more"
