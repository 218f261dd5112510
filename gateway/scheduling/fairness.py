"""Whose turn it is: deficit round robin over tenants, by estimated cost; within a tenant its models take turns."""

from __future__ import annotations

from collections import OrderedDict

QUANTUM = 2048
LONGEST_STAY = 16


class FairShare:
    """Models that have a command to run, each with the cost of that command, in tokens or their like (> 0).

    A tenant is given `quantum` of credit when its visit begins and runs while its credit covers its next command.
    Credit ends when a tenant has nothing to run: it cannot be saved up. Somebody is always picked while anybody is
    offered. A model may stay: it comes first among its tenant's, but `LONGEST_STAY` times in a row at most.
    """

    def __init__(self, quantum: int = QUANTUM) -> None:
        self._quantum = quantum
        self._ring: OrderedDict[str, OrderedDict[str, int]] = OrderedDict()
        self._credit: dict[str, int] = {}
        self._visited: str | None = None
        self._picked: str | None = None
        self._num_picked = 0

    def offer(self, tenant: str, model_id: str, cost: int, stays: bool = False) -> None:
        """Note that the model's next command costs `cost`; a model offered before keeps its place.

        stays: it would rather go on now, if it was picked last.
        """
        if tenant not in self._ring:
            self._ring[tenant] = OrderedDict()
            self._credit[tenant] = 0
        self._ring[tenant][model_id] = cost
        if stays and model_id == self._picked and self._num_picked < LONGEST_STAY:
            self._ring[tenant].move_to_end(model_id, last=False)

    def withdraw(self, tenant: str, model_id: str) -> None:
        if tenant in self._ring:
            self._ring[tenant].pop(model_id, None)

    def pick(self) -> str | None:
        """The model whose command is to run now, withdrawn from the offers; None when there is none.

        A model that was picked is to be offered again before the next pick if it has more to run, or its tenant
        forfeits its credit and its place.
        """
        self._drop_tenants_without_offers()
        while self._ring:
            for _ in range(len(self._ring)):
                tenant = next(iter(self._ring))
                if (model_id := self._visit(tenant)) is not None:
                    return model_id
                self._ring.move_to_end(tenant)
            self._pass_fruitless_rounds()
        return None

    def _visit(self, tenant: str) -> str | None:
        if self._visited != tenant:
            self._credit[tenant] += self._quantum
            self._visited = tenant
        model_id, cost = next(iter(self._ring[tenant].items()))
        if self._credit[tenant] < cost:
            self._visited = None
            return None
        self._credit[tenant] -= cost
        del self._ring[tenant][model_id]
        self._num_picked = self._num_picked + 1 if model_id == self._picked else 1
        self._picked = model_id
        return model_id

    def _pass_fruitless_rounds(self) -> None:
        """Give everybody the credit of the rounds in which nobody could pay, all at once."""
        rounds = min(self._missing(tenant) // self._quantum for tenant in self._ring)
        for tenant in self._ring:
            self._credit[tenant] += rounds * self._quantum

    def _missing(self, tenant: str) -> int:
        """Credit short of the next command, less one: so many whole quanta are sure not to be enough."""
        return max(0, next(iter(self._ring[tenant].values())) - self._credit[tenant] - 1)

    def _drop_tenants_without_offers(self) -> None:
        for tenant in [tenant for tenant, models in self._ring.items() if not models]:
            del self._ring[tenant], self._credit[tenant]
            if self._visited == tenant:
                self._visited = None
