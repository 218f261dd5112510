"""Save a slot: begin → capture → write → vote → manifest, freeze, point → answer. A failure anywhere changes nothing.

Of these only the capture needs the ranks to stand still. No step after it is a collective: a rank that fails to write
says so in its vote, and the others never wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer_cell.checkpoint.capture import CaptureBuffer
from trainer_cell.checkpoint.failures import vault_failures
from trainer_cell.checkpoint.manifest_of import SaveFacts, compose_manifest
from trainer_cell.checkpoint.plan import PlanCache, SavePlan
from trainer_cell.checkpoint.vote import BallotBox, Vote
from trainer_cell.protocol.commands import SaveState
from trainer_cell.protocol.errors import CommandFailed
from trainer_cell.protocol.outcomes import Progress, StateSaved
from trainer_cell.ranks import Ranks, attempt, one_failure
from trainer_cell.training.slots import Slot
from trainer_cell.vault.layout import CheckpointAddress, Vault
from trainer_cell.vault.publish import begin, finish
from trainer_cell.vault.shard_file import TensorPiece, WrittenShard, write_shard
from trainer_cell.vault.staging import Staging, abandon

Report = Callable[[Progress], None]

# A rank that has not voted by then is taken to have failed: a floor, and the slowest disk worth waiting for.
_VOTE_FLOOR_S = 60.0
_SLOWEST_BYTES_PER_S = 5e6


@dataclass(frozen=True)
class SaveContext:
    """What saving needs of its cell, the same for every save."""

    ranks: Ranks
    vault: Vault
    ballots: BallotBox
    plans: PlanCache
    buffer: CaptureBuffer
    facts: SaveFacts
    no_save_optim: bool


def save_slot(context: SaveContext, slot: Slot, command: SaveState, report: Report) -> StateSaved | None:
    """Publish the slot as `command` asks. Rank 0 returns the outcome once it is durable, the other ranks None.

    Raises `CommandFailed`; the slot is not touched either way.
    """
    ranks = context.ranks
    include_optimizer = command.include_optimizer and not context.no_save_optim
    plan = context.plans.plan(slot.spec, slot.adapter.table, include_optimizer)
    token = ranks.first(lambda: _begin(context, command, plan))
    try:
        captured = ranks.agree(lambda: context.buffer.capture(plan.pieces[ranks.rank], slot.state()))
    except CommandFailed:
        if ranks.is_first:
            abandon(Staging.attach(context.vault, token))
        raise
    report(Progress(command.command_id, "writing", 0, plan.num_bytes))
    shard, verdict = attempt(lambda: _write(context, token, captured, command, plan, report))
    vote = Vote(verdict, shard)
    if not ranks.is_first:
        context.ballots.cast(token, vote)
        return None
    deadline_s = _VOTE_FLOOR_S + plan.num_bytes / _SLOWEST_BYTES_PER_S
    votes = context.ballots.collect(token, vote, deadline_s)
    report(Progress(command.command_id, "publishing", plan.num_bytes, plan.num_bytes))
    return _publish(context, slot, command, token, votes, include_optimizer)


def _begin(context: SaveContext, command: SaveState, plan: SavePlan) -> str:
    address = CheckpointAddress(command.model_id, command.kind, command.name)
    if command.quota is not None:
        command.quota.check(plan.num_bytes)
    with vault_failures():
        return begin(context.vault, address, command.overwrite, plan.num_bytes, context.facts.epoch).token


def _write(
    context: SaveContext,
    token: str,
    captured: Sequence[TensorPiece],
    command: SaveState,
    plan: SavePlan,
    report: Report,
) -> WrittenShard | None:
    if not captured:
        return None
    staging = Staging.attach(context.vault, token)
    done = 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        report(Progress(command.command_id, "writing", min(done, plan.num_bytes), plan.num_bytes))

    with vault_failures():
        return write_shard(staging, f"rank{context.ranks.rank:05d}.safetensors", captured, count)


def _publish(
    context: SaveContext, slot: Slot, command: SaveState, token: str, votes: Sequence[Vote], has_optimizer: bool
) -> StateSaved:
    staging = Staging.attach(context.vault, token)
    noes = [(rank, vote.verdict) for rank, vote in enumerate(votes) if vote.verdict.kind is not None]
    if noes:
        abandon(staging)
        raise one_failure(noes, context.ranks.world)
    shards = [vote.shard for vote in votes if vote.shard is not None]
    manifest = compose_manifest(context.facts, slot, command, shards, has_optimizer)
    with vault_failures():
        version = finish(context.vault, staging, manifest, command.overwrite)
    return StateSaved(
        command_id=command.command_id,
        version=version,
        step=manifest.step,
        iteration=manifest.iteration,
        has_optimizer=manifest.has_optimizer,
        size_bytes=manifest.size_bytes,
    )
