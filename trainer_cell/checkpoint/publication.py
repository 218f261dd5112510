"""What follows a capture, on one rank, in a thread beside the trainer: begin → write → vote → publish → answer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from trainer_cell.checkpoint.capture import SaveBuffer, SaveBuffers
from trainer_cell.checkpoint.failures import vault_failures
from trainer_cell.checkpoint.manifest_of import Captured, SaveFacts, compose_manifest
from trainer_cell.checkpoint.plan import SavePlan
from trainer_cell.checkpoint.vote import BallotBox, Booth, Vote, noes
from trainer_cell.protocol.commands import SaveState
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import Failed, Progress, Said, StateSaved
from trainer_cell.ranks import Ranks, attempt, one_failure
from trainer_cell.vault.layout import RECOVERY, CheckpointAddress, Vault
from trainer_cell.vault.manifest import FileRecord, Manifest
from trainer_cell.vault.publish import begin, finish
from trainer_cell.vault.shard_file import write_image
from trainer_cell.vault.staging import Staging, abandon

log = logging.getLogger(__name__)

# A rank that has not voted by then is taken to have failed: a floor, and the slowest disk worth waiting for.
_FLOOR_S = 60.0
_SLOWEST_BYTES_PER_S = 5e6
# Below that a thread costs more than it saves.
_CHECKED_BESIDE_BYTES = 16 << 20


@dataclass(frozen=True)
class PublishContext:
    """What publishing needs of its cell, the same for every save."""

    ranks: Ranks
    vault: Vault
    ballots: BallotBox
    buffers: SaveBuffers
    facts: SaveFacts


class Publication:
    """One attempt on one rank; it owns `buffer` and gives it back. say: to the gateway, from any thread."""

    def __init__(
        self,
        context: PublishContext,
        command: SaveState,
        plan: SavePlan,
        captured: Captured,
        buffer: SaveBuffer,
        say: Callable[[Said], None],
    ) -> None:
        self._context, self._command, self._plan = context, command, plan
        self._captured, self._buffer, self._say = captured, buffer, say
        self._patience_s = _FLOOR_S + plan.num_bytes / _SLOWEST_BYTES_PER_S
        self._deadline = time.monotonic() + self._patience_s
        self._lock = threading.Lock()
        self._is_answered = False
        self._is_showing = False

    def run(self) -> None:
        """To the end; rank 0 says the outcome."""
        with self._context.ballots.booth() as booth:
            if self._context.ranks.is_first:
                self._lead(booth)
            else:
                self._follow(booth)

    def _follow(self, booth: Booth) -> None:
        with self._context.buffers.lent(self._buffer):
            vote = self._vote(booth.announced(self._command.command_id, self._patience_s))
        booth.cast(self._command.command_id, vote)

    def _lead(self, booth: Booth) -> None:
        try:
            self._answer(self._publish(booth))
        except CommandFailed as failure:
            log.warning("save %s of %s failed: %r", self._command.name, self._command.model_id, failure)
            self._answer(Failed(self._command.command_id, failure.kind, failure.message))

    def _answer(self, outcome: StateSaved | Failed) -> None:
        with self._lock:
            is_late, self._is_answered = self._is_answered, True
        if not is_late:
            self._say(outcome)

    def give_up_if_overdue(self) -> None:
        """The disk keeps rank 0 itself waiting: answer, and do not show what may yet come of it."""
        if self._context.ranks.is_first and not self._is_showing and time.monotonic() > self._deadline:
            reason = f"the checkpoint was not written within {self._patience_s:.0f} s"
            self._answer(Failed(self._command.command_id, ErrorKind.DEADLINE_EXCEEDED, reason))

    def _publish(self, booth: Booth) -> StateSaved:
        command_id = self._command.command_id
        with self._context.buffers.lent(self._buffer):
            token, begun = attempt(self._begin)
            booth.announce(command_id, token)
            vote = self._vote(token) if begun.kind is None else Vote(begun, None)
        votes = booth.collect(command_id, vote, self._patience_s)
        if token is None:
            raise one_failure([(0, begun)], 1)
        staging = Staging.attach(self._context.vault, token)
        if said_no := noes(votes):
            abandon(staging)
            raise one_failure(said_no, self._context.ranks.world)
        return self._show(staging, self._manifest(votes))

    def _begin(self) -> str:
        command, context = self._command, self._context
        address = CheckpointAddress(command.model_id, command.kind, command.name)
        with vault_failures():
            return begin(context.vault, address, command.overwrite, self._plan.num_bytes, context.facts.epoch).token

    def _vote(self, token: str | None) -> Vote:
        written, verdict = attempt(lambda: self._write(token))
        return Vote(verdict, *(written or (None, True)))

    def _write(self, token: str | None) -> tuple[FileRecord | None, bool]:
        """This rank's shard, None when it has nothing to write, or nowhere to; and whether all in it is finite."""
        layout = self._plan.layouts[self._context.ranks.rank]
        if token is None or layout is None:
            return None, True
        staging = Staging.attach(self._context.vault, token)
        if layout.size < _CHECKED_BESIDE_BYTES:
            is_finite = self._check_values()
            with vault_failures():
                return write_image(staging, layout, self._buffer.image, self._reporter(layout.size)), is_finite
        # Beside the write, which waits for the disk.
        with ThreadPoolExecutor(1) as checker:
            check = checker.submit(self._check_values)
            with vault_failures():
                record = write_image(staging, layout, self._buffer.image, self._reporter(layout.size))
            return record, check.result()

    def _check_values(self) -> bool:
        """Whether all are finite. Raises `CommandFailed` (NON_FINITE_STATE) where they must be: a checkpoint that no
        load accepts must not take the place of one that works. A recovery snapshot tells what is, whatever it is."""
        part = self._buffer.find_non_finite(self._plan, self._context.ranks.rank)
        if part is not None and self._command.kind != RECOVERY:
            raise CommandFailed(ErrorKind.NON_FINITE_STATE, f"the model's {part} holds NaN or infinite values")
        return part is None

    def _reporter(self, num_bytes: int) -> Callable[[int], None] | None:
        """Tells of the whole what rank 0 knows of its own part."""
        if not self._context.ranks.is_first:
            return None
        done = 0

        def count(written: int) -> None:
            nonlocal done
            done = min(done + written, num_bytes)
            self._report("writing", self._plan.num_bytes * done // num_bytes)

        return count

    def _report(self, phase: Any, num_bytes: int) -> None:
        self._say(Progress(self._command.command_id, phase, num_bytes, self._plan.num_bytes))

    def _manifest(self, votes: list[Vote]) -> Manifest:
        files = {
            layout.file: vote.record
            for layout, vote in zip(self._plan.layouts, votes, strict=True)
            if layout is not None and vote.record is not None
        }
        return compose_manifest(
            self._context.facts,
            self._captured,
            self._command,
            self._plan.index.tensors,
            files,
            non_finite=not all(vote.is_finite for vote in votes),
        )

    def _show(self, staging: Staging, manifest: Manifest) -> StateSaved:
        with self._lock:
            if self._is_answered:
                abandon(staging)
                raise CommandFailed(ErrorKind.DEADLINE_EXCEEDED, "given up before it was published")
            # From here on the outcome is what the disk says, however long it takes to say it.
            self._is_showing = True
        self._report("publishing", self._plan.num_bytes)
        with vault_failures():
            version = finish(self._context.vault, staging, manifest, self._command.overwrite, self._plan.index)
        return StateSaved(
            command_id=self._command.command_id,
            version=version,
            step=manifest.step,
            iteration=manifest.iteration,
            has_optimizer=manifest.has_optimizer,
            size_bytes=manifest.size_bytes,
        )
