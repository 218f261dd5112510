"""What went into a model's accumulated gradient since it was last consumed or dropped, as far as it went wrong."""

from __future__ import annotations

from gateway.scheduling.futures import Future


class GradientWindow:
    """Guards a pipelined client from stepping on a gradient that lacks a part it does not know to be missing."""

    def __init__(self) -> None:
        self._failed: list[Future] = []

    def note_failure(self, forward_backward: Future) -> None:
        self._failed.append(forward_backward)

    def is_partial_for(self, optim_step: Future) -> bool:
        """True when the step was accepted before the client had been told of a failure in the window."""
        return any(
            failed.told_moment is None or failed.told_moment > optim_step.accepted_moment for failed in self._failed
        )

    def clear(self) -> None:
        self._failed.clear()
