"""The rules of retention, against a plain reading of them, version by version."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer_cell.vault.layout import VersionName
from trainer_cell.vault.retention import Candidate, Rules, decide

GRACE_S = 100.0


@st.composite
def models(draw: st.DrawFn) -> list[Candidate]:
    """Up to nine versions under few names; a name points at any one of its versions, or at none."""
    names = [draw(st.sampled_from([("weights", "a"), ("weights", "b"), ("weights", "c"), ("sampler_weights", "a")]))
             for _ in range(draw(st.integers(0, 9)))]  # fmt: skip
    versions = [VersionName(kind, name, f"{index:026d}") for index, (kind, name) in enumerate(names)]
    public = {draw(st.sampled_from([None, *(one for one in versions if (one.kind, one.name) == name)])) for name in
              sorted(set(names))}  # fmt: skip
    flag = st.booleans()
    return [
        Candidate(
            version=version,
            is_public=version in public,
            is_complete=draw(st.integers(0, 4)) > 0,
            is_finite=draw(flag),
            is_pinned=draw(st.integers(0, 5)) == 0,
            is_expired=draw(st.integers(0, 4)) == 0,
            doomed=draw(st.sampled_from([None, None, None, None, "deleted", "expired"])),
            iteration=draw(st.integers(0, 6)),
            age_s=draw(st.sampled_from([0.0, 99.0, 100.0, 1e6])),
            replaced_for_s=draw(st.sampled_from([None, 0.0, 99.0, 100.0, 1e6])),
        )
        for version in versions
    ]


rules = st.builds(
    Rules,
    replaced_grace_s=st.just(GRACE_S),
    keep_last=st.none() | st.integers(1, 4),
    keep_every=st.none() | st.integers(1, 4),
)


def protected(model: list[Candidate]) -> set[VersionName]:
    """The latest complete and the latest finite version of each kind, of those that do not go by their owner's word."""
    found = set()
    for kind in ("weights", "sampler_weights"):
        good = [
            one
            for one in model
            if one.version.kind == kind
            and one.is_complete
            and one.doomed is None
            and (one.is_pinned or not one.is_expired)
        ]
        found |= {max(some, key=lambda one: one.version.ulid).version
                  for some in (good, [one for one in good if one.is_finite]) if some}  # fmt: skip
    return found


def goes(one: Candidate, model: list[Candidate], rules: Rules) -> bool:
    """One version, by the words of the docstring."""
    if one.doomed is not None:
        return True
    if not one.is_complete:
        return False
    group = [
        other for other in model if (other.version.kind, other.version.name) == (one.version.kind, one.version.name)
    ]
    public = next((other for other in group if other.is_public), None)
    if public is None:
        return False
    if public.doomed is not None:
        return True
    any_pinned = any(other.is_pinned for other in group)
    if public.is_complete and public.is_expired and not any_pinned:
        return True
    if (
        public.is_complete
        and not any_pinned
        and not any(other.version in protected(model) for other in group)
        and public.age_s >= GRACE_S
        and is_dropped(public, model, rules)
    ):
        return True
    if one is public or one.version.ulid > public.version.ulid or one.is_pinned:
        return False
    is_due = one.replaced_for_s is not None and one.replaced_for_s >= GRACE_S
    return one.is_expired or (is_due and one.version not in protected(model))


def is_dropped(public: Candidate, model: list[Candidate], rules: Rules) -> bool:
    if public.version.kind != "weights" or (rules.keep_last is None and rules.keep_every is None):
        return False
    later = [
        other
        for other in model
        if other.is_public
        and other.is_complete
        and other.doomed is None
        and not other.is_expired
        and other.version.kind == "weights"
        and other.version.ulid > public.version.ulid
    ]
    if rules.keep_last is not None and len(later) < rules.keep_last:
        return False
    return rules.keep_every is None or public.iteration % rules.keep_every != 0


def check(model: list[Candidate], rules: Rules) -> None:
    check_words(model, rules)
    check_what_must_stay(model, rules)
    check_keep_last(model, rules)


@settings(max_examples=60, deadline=None)
@given(models(), rules)
def test_what_goes_is_what_the_words_say_and_what_must_stay_stays(model: list[Candidate], rules: Rules) -> None:
    check(model, rules)


@pytest.mark.full
@settings(max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(models(), rules)
def test_in_thousands_of_models_what_goes_is_what_the_words_say(model: list[Candidate], rules: Rules) -> None:
    check(model, rules)


def check_words(model: list[Candidate], rules: Rules) -> None:
    assert set(decide(model, rules)) == {one.version for one in model if goes(one, model, rules)}


def check_what_must_stay(model: list[Candidate], rules: Rules) -> None:
    gone = decide(model, rules)
    for one in model:
        if one.doomed is not None:
            assert gone[one.version] == one.doomed
            continue
        public = next((other for other in model if other.is_public and (other.version.kind, other.version.name) == (
            one.version.kind, one.version.name)), None)  # fmt: skip
        by_owner = public is not None and public.doomed is not None
        if not one.is_complete or (one.is_pinned and not by_owner) or public is None:
            assert one.version not in gone
        if one.version in protected(model) and not by_owner:
            # A later TTL of the name's public version takes what it replaced, too.
            assert gone.get(one.version) in (None, "expired")
        if one.is_public and one.version in gone and not by_owner:
            group = [other for other in model if (other.version.kind, other.version.name) == (
                one.version.kind, one.version.name)]  # fmt: skip
            assert all(other.version in gone for other in group if other.is_complete), "a name goes as a whole"


def check_keep_last(model: list[Candidate], rules: Rules) -> None:
    gone = decide(model, rules)
    alive = [
        one
        for one in model
        if one.is_public
        and one.is_complete
        and one.version.kind == "weights"
        and one.doomed is None
        and not one.is_expired
    ]
    left = [one for one in alive if one.version not in gone]
    if rules.keep_last is None and rules.keep_every is None:
        assert left == alive
    else:
        assert len(left) >= min(rules.keep_last or 0, len(alive))


def candidate(name: str, number: int, **facts: object) -> Candidate:
    fields: dict[str, object] = {
        "version": VersionName("weights", name, f"{number:026d}"),
        "is_public": True,
        "is_complete": True,
        "is_finite": True,
        "is_pinned": False,
        "is_expired": False,
        "doomed": None,
        "iteration": number,
        "age_s": 1e6,
        "replaced_for_s": 0.0,
    }
    return Candidate(**{**fields, **facts})  # type: ignore[arg-type]


def left(model: list[Candidate], rules: Rules) -> list[str]:
    gone = decide(model, rules)
    return [one.version.name for one in model if one.version not in gone]


def test_the_latest_three_by_the_order_of_saves_stay_whatever_their_names() -> None:
    names = ["8", "9", "10", "11", "0098", "0101", "final", "a10", "a9"]
    model = [candidate(name, number) for number, name in enumerate(names)]
    assert left(model, Rules(keep_last=3)) == ["final", "a10", "a9"]
    assert left(list(reversed(model)), Rules(keep_last=3)) == ["a9", "a10", "final"]


def test_every_fourth_iteration_stays_and_the_latest_two() -> None:
    model = [candidate(f"n{number}", number) for number in range(1, 12)]
    assert left(model, Rules(keep_last=2, keep_every=4)) == ["n4", "n8", "n10", "n11"]
    assert left(model, Rules(keep_every=4)) == ["n4", "n8", "n11"], "the latest always stays"


def test_the_latest_finite_one_outlives_any_number_of_later_ones_that_are_not() -> None:
    model = [candidate("healthy", 0), *(candidate(f"nan{number}", number, is_finite=False) for number in range(1, 6))]
    assert left(model, Rules(keep_last=2)) == ["healthy", "nan4", "nan5"]
    healed = [*model, candidate("healed", 6)]
    assert left(healed, Rules(keep_last=2)) == ["nan5", "healed"]
    overwritten = [
        candidate("n", 0, is_public=False, replaced_for_s=1e6),
        candidate("n", 1, is_finite=False),
    ]
    assert len(left(overwritten, Rules())) == 2
