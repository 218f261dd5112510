"""Which models are resident in the attached cell, least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class Residency:
    """The gateway's picture of the cell's slots; the cell's own hello is the truth it starts from."""

    def __init__(self) -> None:
        self._used: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._used

    def __len__(self) -> int:
        return len(self._used)

    def touch(self, model_id: str) -> None:
        """The model is resident, and in use now."""
        self._used[model_id] = None
        self._used.move_to_end(model_id)

    def leave(self, model_id: str) -> None:
        self._used.pop(model_id, None)

    def all(self) -> list[str]:
        return list(self._used)

    def clear(self) -> list[str]:
        """Nothing is resident any more; what was."""
        gone = list(self._used)
        self._used.clear()
        return gone

    def first(self, may_give_way: Callable[[str], bool]) -> str | None:
        """The least recently used model that may give its slot away."""
        return next((model_id for model_id in self._used if may_give_way(model_id)), None)
