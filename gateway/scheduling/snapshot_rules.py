"""When a model that is being trained is given another recovery snapshot."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.scheduling.history import History

STEPS = 20
PAYLOAD_BYTES = 64 << 20


@dataclass(frozen=True)
class SnapshotRules:
    """steps: after so many optimizer steps; payload_bytes: or once the journal keeps so much for the model; seconds: or
    so long after the first step that the last snapshot lacks. After a load always: what it read may be let go then.
    """

    steps: int = STEPS
    payload_bytes: int = PAYLOAD_BYTES
    seconds: float = 300.0

    def is_due(self, history: History, now_s: float) -> bool:
        """Right after a command; now_s: monotonic. Only when a snapshot would spare everything there is to do again."""
        if not history.changes or history.weights_turn != history.last_turn or now_s < history.next_try_s:
            return False
        changes = history.changes
        if changes[-1].what == "load" or history.payload_bytes >= self.payload_bytes:
            return True
        if sum(change.what == "optim_step" for change in changes) >= self.steps:
            return True
        return history.dirty_since_s is not None and now_s - history.dirty_since_s >= self.seconds
