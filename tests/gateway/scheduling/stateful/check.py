"""What must be so when everything has come to rest."""

from __future__ import annotations

from gateway.scheduling.execution import MOST_LOSSES
from gateway.store.records import CommandRecord
from tests.gateway.scheduling.rig import forward_backward
from tests.gateway.scheduling.stateful.clients import Clients, ClientsModel, Sent
from tests.gateway.scheduling.stateful.reference import Reference
from tests.gateway.scheduling.stateful.world import World
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import Success
from trainer_cell.vault.layout import CheckpointAddress, Vault

# In simulated time; a number that never comes is sealed within it, a save published, a model brought back.
PATIENCE_S = 2000.0


def let_it_rest(world: World, clients: Clients) -> None:
    """Nothing goes wrong any more, and clients send again what they do not know to be accepted."""
    world.heal()
    end = world.clock.now + PATIENCE_S
    while True:
        assert world.clock.now < end, f"not answered: {_starving(world, clients)}"
        world.start_gateway()
        world.start_cell()
        world.run(for_s=1.0)
        clients.poll()
        if all(sent.is_told for sent in clients.all() if sent.state == "accepted") and not clients.to_send:
            return
        for sent in clients.to_send:
            clients.send(sent)


def _starving(world: World, clients: Clients) -> list[str]:
    gateway = world.gateway
    assert gateway is not None
    found = []
    for sent in clients.all():
        if not sent.is_told:
            future = gateway.scheduler.futures.find(sent.request_id or "")
            state = future and (future.state, future.attempts, future.turn, future.waiting_for)
            found.append(f"{sent.model.model_id} {sent.seq_id} {type(sent.request).__name__} {sent.state} {state}")
    return found


def check(world: World, clients: Clients) -> None:
    gateway = world.gateway
    assert gateway is not None
    rows: dict[str, dict[str, CommandRecord]] = {}
    for row in gateway.journal.load().commands:
        rows.setdefault(row.model_id, {})[row.request_id] = row
    check_tellings(world, clients)
    for client in clients.models:
        if client.sent[0].state == "accepted":
            assert client.model_id in rows, f"accepted {client.model_id} is in the journal: False"
            of_model = rows.pop(client.model_id)
            for sent in client.all:
                is_there = sent.request_id in of_model
                assert is_there == (sent.state == "accepted"), (
                    f"{sent.state} {sent.request} is in the journal: {is_there}"
                )
            reference = Reference(client, of_model, world)
            _check_disk(world, client, reference)
            if not (reference.is_over or reference.not_made):
                _check_slot(world, clients, client, reference)
    assert not rows, "commands of models that nobody has asked for"


def check_tellings(world: World, clients: Clients) -> None:
    """That an answer was told is on record soon, and at the latest with the next that is accepted."""
    for sent in clients.all():
        if sent.request_id is not None and world.tellings.must_be_known(sent.told_s, sent.told_in):
            is_known = world.tellings.is_known(sent.request_id, sent.told_in)
            assert is_known, f"{sent.model.model_id} {sent.seq_id} was told in life {sent.told_in}: not on record"


def _check_disk(world: World, client: ClientsModel, reference: Reference) -> None:
    vault = Vault(world.root)
    for name, (_, version) in reference.saved.items():
        assert vault.resolve(CheckpointAddress(client.model_id, "weights", name)) == version


def _check_slot(world: World, clients: Clients, client: ClientsModel, reference: Reference) -> None:
    told = _probe(world, clients, client)
    if isinstance(told, CommandFailed) and told.kind is ErrorKind.MODEL_LOST:
        # After so many crashes it was given up; the next cell brings it back.
        num_lost = world.losses.of_model(client.model_id, world.living)
        assert num_lost >= MOST_LOSSES, f"{told!r} after {num_lost} losses"
        world.kill_cell()
        # Until that one has come the model is still lost.
        let_it_rest(world, clients)
        told = _probe(world, clients, client)
    assert not isinstance(told, CommandFailed), f"{client.model_id} cannot be used: {told!r}"
    assert world.cell is not None
    # It may have been parked since.
    found = world.cell.slots.models.get(client.model_id) or world.cell.last_seen[client.model_id]
    expected = reference.model
    assert expected is not None
    parts = ("weight", "momentum", "step", "iteration", "pending")
    both = {part: (getattr(found, part), getattr(expected, part)) for part in parts}
    assert all(one == other for one, other in both.values()), f"{client.model_id}: {both}"


def _probe(world: World, clients: Clients, client: ClientsModel) -> Success | CommandFailed | None:
    """What a command is told that has the model brought into a slot, and changes nothing."""
    probe = Sent(client, None, forward_backward(only=True), f"probe of {client.model_id} {world.clock.now}")
    clients.send(probe)
    let_it_rest(world, clients)
    return probe.told
