"""Programs of clients and crashes, drawn by hypothesis, and what must be so at the end of each."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from gateway.scheduling.requests import Request, UnloadRequest
from tests.gateway.scheduling.rig import create, forward_backward, load, optim_step, path_of, rejected, save
from tests.gateway.scheduling.stateful import check
from tests.gateway.scheduling.stateful.clients import Clients, ClientsModel, Sent
from tests.gateway.scheduling.stateful.world import World, copy_of, template

KINDS = ("forward_backward", "optim_step", "save", "overwrite", "load", "only", "bad", "rejected", "cold load")
MODELS = 4

_SHM = Path("/dev/shm")
_index = st.integers(0, 1000)


def request_of(kind: str, number: int, model_id: str) -> Request:
    """number: 0 … 3, tells requests of one kind apart."""
    match kind:
        case "forward_backward":
            return forward_backward(*range(1, number + 2))
        case "only":
            return forward_backward(number, only=True)
        case "bad":
            return forward_backward(number, loss="no such")
        case "rejected":
            return rejected()
        case "save":
            return save(f"s{number}")
        case "overwrite":
            return save(f"s{number}", overwrite=True)
        case "load":
            return load(path_of(model_id, f"s{number}"))
        case "cold load":
            return load(path_of(model_id, f"s{number}"), load_optimizer=False)
        case "unload":
            return UnloadRequest()
    return optim_step()


@cache
def place() -> Path:
    """Where all programs of this process run, one after the other, each from a copy of the template."""
    directory = Path(tempfile.mkdtemp(prefix="cellgate", dir=_SHM if _SHM.is_dir() else None))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    template(directory / "template")
    return directory


class Programs(RuleBasedStateMachine):
    """Rules do something to the world and let it go on for a little; `teardown` lets it come to rest and looks."""

    def __init__(self) -> None:
        super().__init__()
        self._stack = ExitStack()
        self._directory = place() / "world"
        copy_of(place() / "template", self._directory)
        self.world: World = None  # type: ignore[assignment]

    @initialize(seed=st.integers(0, 2**16), slots=st.integers(1, 3))
    def begin(self, seed: int, slots: int) -> None:
        self.world = World(self._directory, seed, slots)
        self._stack.enter_context(self.world.told_to_all())
        self.clients = Clients(self.world)
        self._live()
        self.clients.open("alice", create(seed=seed))
        self.world.run(until=lambda: bool(self.clients.models))

    def _live(self) -> None:
        self.world.start_gateway()
        self.world.start_cell()
        world = self.world
        world.run(until=lambda: world.gateway is None or world.gateway.start.done())

    def _model(self, index: int) -> ClientsModel | None:
        live = [model for model in self.clients.models if not model.is_over]
        return live[index % len(live)] if live else None

    def _sent(self, index: int) -> Sent | None:
        sent = list(self.clients.all())
        return sent[index % len(sent)] if sent else None

    # What clients do

    @rule(seed=st.integers(0, 50), tenant=st.sampled_from(("alice", "bob")))
    def open(self, seed: int, tenant: str) -> None:
        if len(self.clients.models) < MODELS:
            self.clients.open(tenant, create(seed=seed))
            self.world.run(steps=20)

    @rule(
        model=_index,
        kinds=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 3)), min_size=1, max_size=5),
        order=st.randoms(use_true_random=False),
        in_order=st.booleans(),
        steps=st.integers(0, 60),
    )
    def send(self, model: int, kinds: list[tuple[str, int]], order: object, in_order: bool, steps: int) -> None:
        if (to := self._model(model)) is None:
            return
        batch = [to.new(request_of(kind, number, to.model_id)) for kind, number in kinds]
        if not in_order:
            order.shuffle(batch)  # type: ignore[attr-defined]
        for sent in batch:
            self.clients.send(sent)
        self.world.run(steps=steps)

    @rule(model=_index, rounds=st.integers(1, 3), steps=st.integers(0, 200))
    def train(self, model: int, rounds: int, steps: int) -> None:
        if (to := self._model(model)) is not None:
            for number in range(rounds):
                for kind in ("forward_backward", "optim_step"):
                    self.clients.send(to.new(request_of(kind, number, to.model_id)))
            self.world.run(steps=steps)

    @rule(model=_index, kind=st.sampled_from(KINDS), number=st.integers(0, 3))
    def leave_out(self, model: int, kind: str, number: int) -> None:
        if (to := self._model(model)) is not None:
            to.owed.append(to.new(request_of(kind, number, to.model_id)))

    @rule(model=_index)
    def send_what_was_left_out(self, model: int) -> None:
        if (to := self._model(model)) is not None and to.owed:
            self.clients.send(to.owed.pop(0))
            self.world.run(steps=20)

    @rule(model=_index, kind=st.sampled_from(KINDS), number=st.integers(0, 3), key=st.integers(0, 10**6))
    def send_plain(self, model: int, kind: str, number: int, key: int) -> None:
        if (to := self._model(model)) is not None and all(sent.key != f"k{key}" for sent in self.clients.all()):
            self.clients.send(Sent(to, None, request_of(kind, number, to.model_id), f"k{key}"))
            self.world.run(steps=20)

    @rule(model=_index)
    def unload(self, model: int) -> None:
        if (to := self._model(model)) is not None and len(self.clients.models) > 1:
            self.clients.send(to.new(UnloadRequest()))
            to.is_over = True

    @rule(index=_index)
    def retry(self, index: int) -> None:
        if (sent := self._sent(index)) is not None:
            self.clients.send(sent)
            self.world.run(steps=5)

    @rule(index=_index)
    def retry_what_is_unsure(self, index: int) -> None:
        if unsure := self.clients.unsure:
            self.clients.send(unsure[index % len(unsure)])
            self.world.run(steps=5)

    @rule(index=_index)
    def send_changed(self, index: int) -> None:
        if (sent := self._sent(index)) is not None:
            self.clients.send_changed(sent, rejected("load") if sent.seq_id else create(seed=999))

    @rule(index=_index, kind=st.sampled_from(KINDS), number=st.integers(0, 3))
    def change_what_was_refused(self, index: int, kind: str, number: int) -> None:
        if refused := [sent for sent in self.clients.all() if sent.state == "refused" and sent.seq_id]:
            sent = refused[index % len(refused)]
            sent.request, sent.sent_at, sent.sent_in = request_of(kind, number, sent.model.model_id), [], []
            self.clients.send(sent)
            self.world.run(steps=5)

    @rule()
    def poll(self) -> None:
        self.clients.poll()

    @rule(model=_index)
    def finish(self, model: int) -> None:
        if (of := self._model(model)) is not None:
            self.clients.finish(of)
            self.world.run(steps=20)

    # What passes

    @rule(steps=st.integers(1, 400))
    def go_on(self, steps: int) -> None:
        self.world.run(steps=steps)

    @rule(seconds=st.sampled_from((0.05, 1.0, 30.0)))
    def pass_time(self, seconds: float) -> None:
        self.world.run(for_s=seconds)

    # What goes wrong

    @rule(restarts=st.booleans())
    def kill_cell(self, restarts: bool) -> None:
        self.world.kill_cell()
        self._restart(restarts)

    @rule(restarts=st.booleans(), steps=st.integers(0, 50), is_polled=st.booleans())
    def kill_gateway(self, restarts: bool, steps: int, is_polled: bool) -> None:
        self.world.run(steps=steps)
        if is_polled:
            self.clients.poll()
        self.world.kill_gateway()
        self._restart(restarts)

    @rule(steps=st.integers(1, 150), restarts=st.booleans())
    def kill_gateway_later(self, steps: int, restarts: bool) -> None:
        if (gateway := self.world.gateway) is not None:
            gateway.loop.crash_at = gateway.loop.steps + steps
            self.world.run(until=lambda: self.world.gateway is not gateway, for_s=2.0)
            self._restart(restarts and self.world.gateway is None)

    @rule()
    def kill_both(self) -> None:
        self.world.kill_gateway()
        self.world.kill_cell()
        self._restart(True)

    @rule(calls=st.integers(1, 60))
    def kill_cell_at_a_disk_call(self, calls: int) -> None:
        if self.world.cell is not None:
            self.world.cell.die_at = calls

    @rule()
    def drop_connection(self) -> None:
        if self.world.cell is not None:
            self.world.cell.drop_connection(self.world.chance.random() < 0.5)
            self.world.run(steps=10)

    @rule()
    def restart(self) -> None:
        self._restart(True)

    @rule(many=st.integers(1, 2))
    def fail_forward_backwards(self, many: int) -> None:
        if self.world.cell is not None:
            self.world.cell.faults = many

    @rule(is_full=st.booleans(), failures=st.integers(0, 2), delay_s=st.sampled_from((0.0001, 0.001, 0.05, 3.0)))
    def trouble_state_disk(self, is_full: bool, failures: int, delay_s: float) -> None:
        disk = self.world.state_disk
        disk.is_full, disk.failures, disk.delay_s = is_full, failures, delay_s

    @rule(publish_s=st.sampled_from((0.0, 0.5, 20.0)))
    def change_pace_of_publishing(self, publish_s: float) -> None:
        self.world.publish_s = publish_s

    def _restart(self, is_to: bool) -> None:
        if is_to:
            self._live()

    # The end

    def teardown(self) -> None:
        try:
            if self.world is not None:
                self._come_to_rest()
        finally:
            if self.world is not None:
                self.world.end()
            self._stack.close()
            shutil.rmtree(self._directory, ignore_errors=True)

    def _come_to_rest(self) -> None:
        check.let_it_rest(self.world, self.clients)
        check.check(self.world, self.clients)
        self.world.kill_gateway()
        self.world.kill_cell()
        check.let_it_rest(self.world, self.clients)
        check.check(self.world, self.clients)
