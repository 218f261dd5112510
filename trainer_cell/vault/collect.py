"""Carries out the rules of `retention`: looks without locks, and where something is due, once more under the model's.

In the order of a deletion: the decision is marked, the name goes, the versions follow. A version with a lease, or one
that is `held`, stays until a later collection. A crash anywhere leaves what the next collection, or a start-up, ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from trainer_cell.vault.deletion import doom_if_there_is_room, set_versions_aside, unlink_name
from trainer_cell.vault.errors import NotThere, VaultError
from trainer_cell.vault.inventory import Inventory, Stored, public_versions, version_names
from trainer_cell.vault.layout import CheckpointAddress, Vault, VersionName
from trainer_cell.vault.replaced_clock import ReplacedClock
from trainer_cell.vault.retention import REASONS, Candidate, Reason, Rules, decide, relied_on
from trainer_cell.vault.retention_record import stray_records


@dataclass(frozen=True)
class Due:
    """A version that goes, or went. tenant_digest: None and num_bytes 0 when its manifest does not verify."""

    address: CheckpointAddress
    version: VersionName
    reason: Reason
    num_bytes: int
    tenant_digest: str | None


@dataclass(frozen=True)
class Collected:
    """kept: was due, and is being read or held. errors: one sentence for each model that was skipped."""

    removed: tuple[Due, ...]
    kept: tuple[Due, ...]
    errors: tuple[str, ...]

    @property
    def freed_bytes(self) -> int:
        return sum(due.num_bytes for due in self.removed)


class Collector:
    """held: versions, as `Vault.resolve` tells them, that must stay for a reason the disk does not show."""

    def __init__(
        self,
        vault: Vault,
        rules: Rules,
        inventory: Inventory | None = None,
        held: Callable[[], Collection[str]] = tuple,
        clock: ReplacedClock | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.rules = rules
        self._vault = vault
        self._inventory = inventory or Inventory(vault)
        self._held = held
        self._clock = clock or ReplacedClock()
        self._now = now

    def plan(self) -> tuple[list[Due], list[str]]:
        """What a collection would remove now, leases aside, and the errors it would meet; nothing is changed."""
        due: list[Due] = []
        errors = []
        for model_id in self._vault.models():
            try:
                due += self._due(model_id)
            except VaultError as error:
                errors.append(f"{model_id}: {error}")
        return due, errors

    def collect(self, should_stop: Callable[[], bool] = lambda: False) -> Collected:
        """One round over all models; an error in one does not keep another's from being collected.

        Raises `StorageFailed` only if the root itself cannot be listed.
        """
        removed: list[Due] = []
        kept: list[Due] = []
        errors: list[str] = []
        self._clock.begin_round()
        for model_id in self._vault.models():
            if should_stop():
                return Collected(tuple(removed), tuple(kept), tuple(errors))
            try:
                if self._due(model_id) or self._stray_records(model_id):
                    for due, is_gone in self._collect(model_id):
                        (removed if is_gone else kept).append(due)
            except VaultError as error:
                errors.append(f"{model_id}: {error}")
        self._clock.end_round()
        return Collected(tuple(removed), tuple(kept), tuple(errors))

    def _due(self, model_id: str) -> list[Due]:
        return self._judge(model_id, self._inventory.versions(model_id))

    def _judge(self, model_id: str, stored: list[Stored]) -> list[Due]:
        facts = {one.version: one for one in stored}
        verdicts = decide(self._candidates(model_id, stored), self.rules)
        return [_due(model_id, facts[version], reason) for version, reason in verdicts.items()]

    def _candidates(self, model_id: str, stored: list[Stored]) -> list[Candidate]:
        now = self._now()
        later: dict[tuple[str, str], Stored] = {}
        candidates = []
        for one in reversed(stored):
            name, contents = (one.version.kind, one.version.name), one.contents
            replacer = later.get(name)
            if replacer is not None or one.is_public:
                # Behind the public version; what replaced it is the next one that verifies.
                later[name] = one if contents is not None or replacer is None else replacer
            replaced_for_s: float | None = None
            if replacer is not None and replacer.contents is not None:
                told_s = (now - replacer.contents.created).total_seconds()
                replaced_for_s = self._clock.replaced_for_s(self._vault.version(model_id, one.version), told_s)
            candidates.append(
                Candidate(
                    version=one.version,
                    is_public=one.is_public,
                    is_complete=contents is not None,
                    is_finite=contents is not None and contents.is_finite,
                    is_pinned=one.record.pinned,
                    is_expired=one.is_expired(now),
                    doomed=_reason(one.record.doomed),
                    iteration=contents.iteration if contents is not None else 0,
                    age_s=(now - contents.created).total_seconds() if contents is not None else 0.0,
                    replaced_for_s=replaced_for_s,
                )
            )
        return candidates

    def _collect(self, model_id: str) -> Iterator[tuple[Due, bool]]:
        """What is due, and whether it is gone."""
        vault = self._vault
        try:
            lock = vault.lock_model(model_id)
        except NotThere:
            return
        with lock:
            self._look_again(model_id)
            stored = self._inventory.versions(model_id)
            due = self._judge(model_id, stored)
            by_name: dict[CheckpointAddress, list[Due]] = defaultdict(list)
            for one in due:
                by_name[one.address].append(one)
            for address, versions in by_name.items():
                self._take_name(address, versions, {one.version: one for one in stored})
            held = set(self._held())
            free = [one.version for one in due if vault.version(model_id, one.version) not in held]
            gone = set_versions_aside(vault, model_id, free)
            for path in self._stray_records(model_id):
                vault.disk.unlink(path)
        for one in due:
            yield one, one.version in gone
        for aside in gone.values():
            vault.disk.remove_tree(aside)

    def _stray_records(self, model_id: str) -> list[Path]:
        """A record whose version is missing and still has a name may be needed to mend that."""
        used = {*version_names(self._vault, model_id), *public_versions(self._vault, model_id)}
        return stray_records(self._vault, model_id, used)

    def _look_again(self, model_id: str) -> None:
        """What others go for must still verify: a version that was replaced may have become the last good one."""
        stored = self._inventory.versions(model_id)
        candidates = self._candidates(model_id, stored)
        goes = decide(candidates, self.rules)
        names = {(version.kind, version.name) for version in goes}
        public = {one.version for one in stored if one.is_public and (one.version.kind, one.version.name) in names}
        self._inventory.forget(model_id, relied_on(candidates, self.rules) | public)

    def _take_name(self, address: CheckpointAddress, due: list[Due], facts: Mapping[VersionName, Stored]) -> None:
        """Where the version that the name points at goes, the name goes before it; unmarked where the disk is full, for
        the rules will say the same again."""
        public = next((one for one in due if facts[one.version].is_public), None)
        if public is not None:
            doom_if_there_is_room(
                self._vault, address, {one.version: facts[one.version].record for one in due}, public.reason
            )
            unlink_name(self._vault, address)


def _due(model_id: str, stored: Stored, reason: Reason) -> Due:
    version, contents = stored.version, stored.contents
    return Due(
        address=CheckpointAddress(model_id, version.kind, version.name),
        version=version,
        reason=reason,
        num_bytes=contents.num_bytes if contents is not None else 0,
        tenant_digest=contents.tenant_digest if contents is not None else None,
    )


def _reason(doomed: str | None) -> Reason | None:
    """A word of a later version of this code means that the version is to go, too."""
    return next((reason for reason in REASONS if reason == doomed), "deleted" if doomed is not None else None)
