"""Whose turn it is, over long runs of picks."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.scheduling.fairness import QUANTUM, FairShare


def served(costs: dict[str, int], picks: int) -> Counter[str]:
    """Cost served to each tenant when each always has a next command of the same cost."""
    share, spent = FairShare(), Counter[str]()
    for tenant, cost in costs.items():
        share.offer(tenant, tenant, cost)
    for _ in range(picks):
        tenant = share.pick()
        assert tenant is not None
        spent[tenant] += costs[tenant]
        share.offer(tenant, tenant, costs[tenant])
    return spent


def test_tenants_get_equal_cost_not_equal_numbers_of_commands() -> None:
    spent = served({"small": 100, "large": 5_000}, 10_000)
    assert abs(spent["small"] - spent["large"]) <= 2 * (5_000 + QUANTUM)


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.sampled_from("abcde"), st.integers(1, 50_000), min_size=1))
def test_nobody_falls_behind_by_more_than_a_command_and_a_quantum(costs: dict[str, int]) -> None:
    spent = served(costs, 300)
    if len(spent) == len(costs):
        assert max(spent.values()) - min(spent.values()) <= 2 * (max(costs.values()) + QUANTUM)
    else:
        # So few picks that the dearest have not had a turn: then nobody has had more than the dearest waits for.
        missing = costs.keys() - spent.keys()
        assert max(spent.values()) <= max(costs[tenant] for tenant in missing) + max(costs.values()) + 2 * QUANTUM


def test_a_command_dearer_than_many_quanta_is_picked_at_once_when_alone() -> None:
    share = FairShare()
    share.offer("a", "model", 10**12)
    assert share.pick() == "model"
    assert share.pick() is None


def test_somebody_is_picked_while_anybody_is_offered() -> None:
    share = FairShare()
    for tenant in "abc":
        for model in range(10):
            share.offer(tenant, f"{tenant}{model}", 10**6 * (model + 1))
    picked = [share.pick() for _ in range(30)]
    assert None not in picked
    assert len(set(picked)) == 30
    assert share.pick() is None


def test_models_of_a_tenant_take_turns() -> None:
    share = FairShare()
    for model in ("m1", "m2", "m3"):
        share.offer("a", model, 1)
    order = []
    for _ in range(9):
        model = share.pick()
        assert model is not None
        order.append(model)
        share.offer("a", model, 1)
    assert order == ["m1", "m2", "m3"] * 3


def test_idle_time_earns_no_credit() -> None:
    share = FairShare()
    share.offer("idle", "idle", 1)
    assert share.pick() == "idle"
    for _ in range(100):
        share.offer("busy", "busy", QUANTUM)
        assert share.pick() == "busy"
    share.offer("busy", "busy", QUANTUM)
    share.offer("idle", "idle", QUANTUM)
    order = []
    for _ in range(10):
        model = share.pick()
        assert model is not None
        order.append(model)
        share.offer(model, model, QUANTUM)
    assert order.count("idle") == 5


def test_a_withdrawn_model_is_not_picked() -> None:
    share = FairShare()
    share.offer("a", "m1", 1)
    share.offer("b", "m2", 1)
    share.withdraw("a", "m1")
    share.withdraw("c", "never offered")
    assert share.pick() == "m2"
    assert share.pick() is None
