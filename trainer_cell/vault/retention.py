"""Which versions of a model go, and why: pure rules over what is known of each. `collect` carries them out.

- **doomed**: a deletion that was begun is finished.
- **expired**: its TTL is over. A name goes with all its versions once the version it points at has expired.
- **replaced**: its name has pointed at a later version for longer than the grace; a recovery snapshot has none.
- **not_kept**: with `keep_last` or `keep_every` set, a training checkpoint (`weights`) that is neither among the
  `keep_last` saved last nor at an iteration that `keep_every` divides. Its name goes with all its versions.

Of these, *replaced* and *not_kept* never take the latest complete version of a kind, or the latest complete one whose
tensors are finite (recovery snapshots tell what was, finite or not, and need only the former), and *not_kept* none
younger than the grace. No rule takes a pinned version (a deletion has refused it before), or one that does not verify:
only its owner's deletion does. A TTL is its owner's own word and takes also the latest. A version that is newer than
what its name points at, or whose name is absent, is not a matter of rules: a start-up settles what became of its save.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from trainer_cell.vault.layout import RECOVERY, VersionName

Reason = Literal["deleted", "expired", "replaced", "not_kept"]
REASONS: tuple[Reason, ...] = get_args(Reason)


@dataclass(frozen=True)
class Rules:
    """keep_last: a count of checkpoints, at least 1; keep_every: in iterations, at least 1; None: not set."""

    replaced_grace_s: float = 600.0
    keep_last: int | None = None
    keep_every: int | None = None


@dataclass(frozen=True)
class Candidate:
    """A version and what the rules ask of it.

    is_complete: its manifest and files verify; iteration and is_finite mean something only then.
    age_s: since its save began. replaced_for_s: since its name had a later version that is complete, None
    without one.
    """

    version: VersionName
    is_public: bool
    is_complete: bool
    is_finite: bool
    is_pinned: bool
    is_expired: bool
    doomed: Reason | None
    iteration: int
    age_s: float
    replaced_for_s: float | None


def decide(candidates: Sequence[Candidate], rules: Rules) -> dict[VersionName, Reason]:
    """Of all versions of one model, those that go. With a public version goes its name, and all versions behind it."""
    latest = _latest(candidates)
    kept = _kept_by_rules(candidates, rules)
    by_name: dict[tuple[str, str], list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        by_name[candidate.version.kind, candidate.version.name].append(candidate)
    goes: dict[VersionName, Reason] = {}
    for group in by_name.values():
        public = next((one for one in group if one.is_public), None)
        reason = None if public is None else _name_goes(public, group, latest, kept, rules)
        for one in group:
            why = one.doomed or (reason if one.is_complete else None)
            if why is None and public is not None:
                why = _replaced_goes(one, public, latest, rules)
            if why is not None:
                goes[one.version] = why
    return goes


def relied_on(candidates: Sequence[Candidate], rules: Rules) -> set[VersionName]:
    """The versions because of which others may go: the latest ones, and the public ones as far as keep-last looks."""
    public = sorted(
        (one.version for one in candidates if one.is_public and one.doomed is None), key=lambda version: version.ulid
    )
    return _latest(candidates) | set(public[-(rules.keep_last or 1) :])


def _name_goes(
    public: Candidate, group: list[Candidate], latest: set[VersionName], kept: set[VersionName], rules: Rules
) -> Reason | None:
    if public.doomed is not None:
        return public.doomed
    if not public.is_complete or any(one.is_pinned for one in group):
        return None
    if public.is_expired:
        return "expired"
    is_free = public.version not in kept and not any(one.version in latest for one in group)
    return "not_kept" if is_free and public.age_s >= rules.replaced_grace_s else None


def _replaced_goes(one: Candidate, public: Candidate, latest: set[VersionName], rules: Rules) -> Reason | None:
    if one.is_pinned or not one.is_complete or one.version.ulid >= public.version.ulid:
        return None
    if one.is_expired:
        return "expired"
    grace_s = 0.0 if one.version.kind == RECOVERY else rules.replaced_grace_s
    is_due = one.replaced_for_s is not None and one.replaced_for_s >= grace_s
    return "replaced" if is_due and one.version not in latest else None


def _latest(candidates: Sequence[Candidate]) -> set[VersionName]:
    """The latest complete version of each kind, and the latest of those that are finite; what goes anyway aside."""
    latest: dict[tuple[str, bool], VersionName] = {}
    for one in sorted(candidates, key=lambda one: one.version.ulid):
        if one.is_complete and one.doomed is None and (one.is_pinned or not one.is_expired):
            latest[one.version.kind, False] = one.version
            if one.is_finite and one.version.kind != RECOVERY:
                latest[one.version.kind, True] = one.version
    return set(latest.values())


def _kept_by_rules(candidates: Sequence[Candidate], rules: Rules) -> set[VersionName]:
    """The public versions that keep-last and keep-every let stay: all, where neither is set or the kind is another."""
    has_rules = rules.keep_last is not None or rules.keep_every is not None
    bound = [
        one
        for one in candidates
        if has_rules
        and one.is_public
        and one.version.kind == "weights"
        and one.is_complete
        # What goes anyway takes no other's place.
        and one.doomed is None
        and not one.is_expired
    ]
    bound.sort(key=lambda one: one.version.ulid, reverse=True)
    kept = {one.version for one in candidates} - {one.version for one in bound}
    kept |= {one.version for one in bound[: rules.keep_last or 0]}
    if rules.keep_every is not None:
        kept |= {one.version for one in bound if one.iteration % rules.keep_every == 0}
    return kept
