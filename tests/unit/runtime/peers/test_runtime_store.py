"""The agents' connections while ranks train: what arrives, who may say what, and networks that fail for a while."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.simulated_preflight import vacant
from helpers.site import PATIENCE_S, until

from slurmtrain.errors import LaunchError
from slurmtrain.model.interruption.exit_report import StopRequest
from slurmtrain.runtime.peers import peer_store
from slurmtrain.runtime.peers.channel import Channel, ChannelClosed, Refusals, connect
from slurmtrain.runtime.peers.control_store import ControlStore
from slurmtrain.runtime.peers.peer_store import CoordinatorGone, MessageStore, StoreClient, is_shared, may_publish
from slurmtrain.runtime.preflight.ports import listen

SECRET, OTHER = bytes(32), bytes(range(32))
NODES = 3
STOP = {"cause": "crash", "why": "rank 1 exited", "at": 5.0, "node": 1, "signal": None}


class Attempt:
    """The messages at node 0, and the links of other nodes to it."""

    def __init__(self, nodes: int = NODES) -> None:
        listener = listen("127.0.0.1", 0)
        self.place = ("127.0.0.1", int(listener.getsockname()[1]))
        self.refusals = Refusals()
        self.first = MessageStore()
        self.first.serve(listener, SECRET, nodes, self.refusals)
        self.nodes = nodes
        self.clients: list[StoreClient] = []
        self.is_served = True

    def join(self, node: int, place: tuple[str, int] | None = None) -> StoreClient:
        client = StoreClient(place or self.place, SECRET, node, self.nodes)
        self.clients.append(client)
        client.wait_until_connected(PATIENCE_S, give_up=lambda: False)
        return client

    def end_node_0(self) -> None:
        if self.is_served:
            self.is_served = False
            self.first.close()

    def end(self) -> None:
        for client in self.clients:
            client.close()
        self.end_node_0()


@pytest.fixture
def attempt() -> Iterator[Attempt]:
    running = Attempt()
    yield running
    running.end()


class Wire:
    """Passes on what goes over a connection, byte by byte, until it is cut."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = listen("127.0.0.1", 0)
        self.place = ("127.0.0.1", int(self._listener.getsockname()[1]))
        self.is_cut = threading.Event()
        self.made = 0
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.made += 1
                far = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not self.is_cut.is_set():
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """End all connections."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self.reset()


@pytest.fixture
def wire(attempt: Attempt) -> Iterator[Wire]:
    """A wire between node 1 and node 0."""
    connected = Wire(attempt.place[1])
    yield connected
    connected.close()


def as_node(attempt: Attempt, node: int, talk: Callable[[Channel], Any]) -> Any:
    """What ``talk`` returns, given a connection of an agent that does not keep to the rules."""

    async def scenario() -> Any:
        channel = await connect(*attempt.place, SECRET)
        await channel.send({"node": node})
        try:
            return await talk(channel)
        finally:
            channel.close()

    return asyncio.run(scenario())


async def acknowledged(channel: Channel, number: int) -> None:
    """Wait until node 0 has taken in the frame with this number."""
    while (await channel.receive()).get("ack") != number:
        pass


# --- what arrives -----------------------------------------------------------------------------------------------------


def test_what_any_node_publishes_for_all_reaches_all(attempt: Attempt) -> None:
    first, second = attempt.join(1), attempt.join(2)
    first.publish("0/stop", STOP, first=True)
    until(lambda: second.read("0/stop") == STOP, "the message at node 2")
    until(lambda: first.read("0/stop") == STOP, "the message at its author")
    assert attempt.first.read("0/stop") == STOP
    attempt.first.publish("0/begin", {"port": 1, "resume_from": "ü", "mlflow_run_id": "m"})
    for client in (first, second):
        until(lambda client=client: client.read("0/begin"), "node 0's message")
    # One that connects later gets it, too.
    assert attempt.join(1).read("0/begin") == first.read("0/begin")


def test_the_first_message_stands_where_only_the_first_counts(attempt: Attempt) -> None:
    first, second = attempt.join(1), attempt.join(2)
    first.publish("0/stop", STOP, first=True)
    until(lambda: second.read("0/stop"), "the first message")
    second.publish("0/stop", {**STOP, "node": 2}, first=True)
    second.publish("0/here/2", {})
    until(lambda: attempt.first.read("0/here/2") == {}, "what was published after it")
    assert [link.read("0/stop") for link in (attempt.first, first, second)] == [STOP] * 3


def test_messages_for_node_0_alone_stay_there(attempt: Attempt) -> None:
    first, second = attempt.join(1), attempt.join(2)
    second.publish("0/pace/2", {"2": [1, 0.5]})
    second.publish("0/paused/2", {"paused": True, "at": 5.0})
    assert second.read("0/pace/2") is None
    # A node has its own messages for all at hand at once.
    assert second.read("0/paused/2") == {"paused": True, "at": 5.0}
    until(lambda: first.read_each(["0/pace/2", "0/paused/2"]), "the message for all")
    assert first.read_each(["0/pace/2", "0/paused/2"]) == {"0/paused/2": {"paused": True, "at": 5.0}}
    assert sorted(attempt.first.read_each(["0/pace/2", "0/paused/2", "0/left/2"])) == ["0/pace/2", "0/paused/2"]


def test_64_agents_meet_and_one_message_stops_them_all() -> None:
    attempt = Attempt(64)
    clients = [attempt.join(node) for node in range(1, 64)]
    controls = [ControlStore(link, node, 64) for node, link in enumerate([attempt.first, *clients])]
    for node, control in enumerate(controls):
        control.begin_round(0, range(64))
        control.publish(f"here/{node}", {})
    for control in controls:
        control.gather("here", give_up=lambda: False)
    controls[63].publish_stop(StopRequest(cause="crash", why="rank 63 exited", at=5.0, node=63))
    for control in controls:
        assert until(control.stop_request, "the request").node == 63
    attempt.end()


def test_what_was_published_last_arrives_before_a_node_leaves(attempt: Attempt) -> None:
    for number in range(20):
        client = StoreClient(attempt.place, SECRET, 1, NODES)
        client.wait_until_connected(PATIENCE_S, give_up=lambda: False)
        client.publish(f"{number}/left/1", {})
        client.close()
        assert attempt.first.read(f"{number}/left/1") == {}


def test_what_node_0_published_last_arrives_before_it_leaves() -> None:
    for _ in range(10):
        attempt = Attempt()
        clients = [attempt.join(1), attempt.join(2)]
        attempt.first.publish("0/left/0", {})
        attempt.end_node_0()
        for client in clients:
            until(lambda client=client: client.read("0/left/0") == {}, "the last message")
            client.close()


# --- who may say what -------------------------------------------------------------------------------------------------


def test_a_node_cannot_speak_for_another_one(attempt: Attempt, caplog: pytest.LogCaptureFixture) -> None:
    async def lie(channel: Channel) -> None:
        await channel.send({"put": {"0/ended/2": {}, "0/here/1": {}}, "first": {"0/next": {}}, "number": 1})
        await acknowledged(channel, 1)

    as_node(attempt, 1, lie)
    assert attempt.first.read_each(["0/ended/2", "0/next"]) == {}
    assert attempt.first.read("0/here/1") == {}
    assert caplog.messages == [
        f"dropped a message of node 1: {key!r} is not for it to publish" for key in ("0/next", "0/ended/2")
    ]


@pytest.mark.parametrize("frame", ["junk", 5, None, {"number": 1, "put": []}, {"beat": 1}])
def test_junk_ends_a_connection_and_nothing_else(attempt: Attempt, frame: Any) -> None:
    async def send(channel: Channel) -> None:
        await channel.send(frame)
        with contextlib.suppress(ChannelClosed):
            await channel.receive()

    as_node(attempt, 1, send)
    attempt.join(1).publish("0/here/1", {})
    until(lambda: attempt.first.read("0/here/1") == {}, "the message of an agent")


@pytest.mark.parametrize("key", ["", "0", "0/begin", "0/next", "0/until", "0/together", "0/here/2", "0/ended", "0/x/1"])
def test_keys_under_which_a_node_may_not_publish(key: str) -> None:
    assert not may_publish(key, 1)


@pytest.mark.parametrize("key", ["0/here/1", "3/stop", "0/unready", "0/examined/0/1", "0/inquiry/0", "0/verdict/0"])
def test_keys_under_which_a_node_may_publish(key: str) -> None:
    assert may_publish(key, 1)


def test_of_the_nodes_that_arrive_and_leave_only_node_0_matters_to_all() -> None:
    assert [is_shared(f"0/{kind}/{node}") for kind in ("here", "left") for node in (0, 1)] == [True, False] * 2


@pytest.mark.parametrize("greeting", [0, NODES, -1, True, "1", None])
def test_nobody_is_node_0_or_one_that_there_is_not(attempt: Attempt, greeting: Any) -> None:
    async def wait(channel: Channel) -> str:
        with pytest.raises(Exception, match="closed the connection") as closed:
            await channel.receive()
        return str(closed.value)

    as_node(attempt, greeting, wait)
    until(lambda: attempt.refusals.count == 1, "the refusal")


def test_a_node_has_one_connection_which_is_its_newest(attempt: Attempt) -> None:
    async def replace(channel: Channel) -> None:
        await channel.send({"number": 1})
        await acknowledged(channel, 1)
        newer = await connect(*attempt.place, SECRET)
        await newer.send({"node": 1})
        await newer.send({"number": 5})
        await acknowledged(newer, 5)
        with pytest.raises(Exception, match=r"closed the connection|reset by peer"):
            await channel.receive()
        newer.close()

    as_node(attempt, 1, replace)


def test_an_agent_of_another_attempt_is_refused(attempt: Attempt) -> None:
    client = StoreClient(attempt.place, OTHER, 1, NODES)
    with pytest.raises(LaunchError, match=r"cannot reach node 0 at 127.0.0.1 port \d+: it is not an agent"):
        client.wait_until_connected(0.5, give_up=lambda: False)
    client.close()


# --- networks that fail -----------------------------------------------------------------------------------------------


def test_a_lost_connection_is_made_again_and_nothing_is_lost(attempt: Attempt, wire: Wire) -> None:
    client = attempt.join(1, wire.place)
    for number in range(5):
        client.publish(f"{number}/here/1", {})
        wire.reset()
        attempt.first.publish(f"{number}/begin", {"port": number, "resume_from": None, "mlflow_run_id": None})
        until(lambda number=number: attempt.first.read(f"{number}/here/1") == {}, "the message of node 1")
        until(lambda number=number: client.read(f"{number}/begin"), "the message of node 0")
    assert wire.made > 1


def test_a_connection_over_which_nothing_comes_back_is_replaced(
    attempt: Attempt, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_store, "_STALE_S", 0.3)
    monkeypatch.setattr(peer_store, "_CONNECT_S", 0.3)
    client = attempt.join(1, wire.place)
    wire.is_cut.set()
    client.publish("0/here/1", {})
    until(lambda: wire.made > 2, "attempts to connect")
    assert attempt.first.read("0/here/1") is None
    assert client.read("0/begin") is None  # nothing raises while the network may come back
    wire.is_cut.clear()
    until(lambda: attempt.first.read("0/here/1") == {}, "the message of node 1")


def test_a_node_whose_node_0_refuses_connections_knows_that_it_is_gone(attempt: Attempt) -> None:
    client = attempt.join(1)
    control = ControlStore(client, 1, NODES)
    control.begin_round(0, range(NODES))
    attempt.first.publish("0/begin", {"port": 1, "resume_from": None, "mlflow_run_id": None})
    until(lambda: client.read("0/begin"), "a message of node 0")
    attempt.end_node_0()
    request = until(control.stop_request, "the end of node 0")
    assert (request.cause, request.why, request.node) == ("node_fail", "node 0 no longer answers", 0)
    with pytest.raises(CoordinatorGone, match="Connection refused"):
        client.publish("0/here/1", {})
    assert client.read("0/begin") == {"port": 1, "resume_from": None, "mlflow_run_id": None}


def test_a_node_that_finds_nobody_at_node_0_says_so_unless_it_is_told_to_stop() -> None:
    with vacant("127.0.0.1") as port:
        client = StoreClient(("127.0.0.1", port), SECRET, 2, NODES)
        client.wait_until_connected(PATIENCE_S, give_up=lambda: True)
        with pytest.raises(LaunchError, match=f"node 0 at 127.0.0.1 port {port}: Connection refused"):
            client.wait_until_connected(PATIENCE_S, give_up=lambda: False)
        client.close()
