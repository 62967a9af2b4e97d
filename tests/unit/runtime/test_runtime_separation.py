"""Ranks that do not know each other are noticed by what their processes are connected to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.runtime.agent import monitor
from slurmtrain.runtime.agent.monitor import Separation, SeparationConfig

CONNECTED = {10: {1: ("a", "b")}, 11: {2: ("b", "a")}}
APART: dict[int, dict[int, tuple[str, str]]] = {10: {}, 11: {3: ("x", "server")}}


class Nodes:
    """What nodes publish for each other."""

    def __init__(self) -> None:
        self.messages: dict[str, Mapping[str, Any]] = {}

    def publish(self, name: str, message: Mapping[str, Any]) -> None:
        self.messages[name] = message

    def read(self, name: str) -> Mapping[str, Any] | None:
        return self.messages.get(name)

    def read_each(self, names: Iterable[str]) -> dict[str, Mapping[str, Any]]:
        return {name: self.messages[name] for name in names if name in self.messages}


class Machine:
    """A machine with two ranks, and a clock; what it writes of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, metrics: Path) -> None:
        self.now = 0.0
        self.sockets = APART
        self.loaded = True
        self.why: list[str] = []
        self.nodes = Nodes()
        self.config = SeparationConfig(
            node=0, members=[0], ranks=2, per_node=False, port=9, launched="", metrics=metrics / "metrics.jsonl"
        )
        monkeypatch.setattr(monitor.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(monitor, "read_table", dict)
        monkeypatch.setattr(monitor, "descend", lambda *_: [])
        monkeypatch.setattr(monitor, "has_loaded", lambda *_: self.loaded)
        monkeypatch.setattr(monitor, "sockets_of", lambda pid: {*self.sockets[pid]})
        monkeypatch.setattr(
            monitor, "established", lambda _: {inode: e for own in self.sockets.values() for inode, e in own.items()}
        )

    def watched(self, **changes: Any) -> Separation:
        nodes: Any = self.nodes
        return Separation(replace(self.config, **changes), nodes, self)  # type: ignore[arg-type]

    def write(self, event: Any) -> None:
        self.why.append(event.why)

    def run(self, watch: Separation, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            watch.look({0: 10, 1: 11})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def test_ranks_without_a_connection_are_journaled_once_and_when_they_have_met(machine: Machine) -> None:
    watch = machine.watched()
    machine.run(watch, 150)
    assert machine.why == []
    machine.run(watch, 400)
    [why] = machine.why
    assert why.startswith("ranks 0 and 1 have no connection to each other")
    machine.sockets = CONNECTED
    machine.run(watch, 400)
    assert machine.why == [why, ""]
    assert "together" in machine.nodes.messages


@pytest.mark.parametrize(("seconds", "is_judged"), [(20, True), (5, False)])
def test_a_short_training_is_judged_when_it_has_completed(machine: Machine, seconds: int, is_judged: bool) -> None:
    watch = machine.watched()
    machine.run(watch, seconds)
    watch.end()
    assert bool(machine.why) is is_judged
    # Steps prove that they would have met by now.
    machine.config.metrics.write_text("{}\n")
    machine.why.clear()
    machine.run(machine.watched(), 60)
    assert len(machine.why) == 1


def test_ranks_that_have_met_between_two_looks_are_no_news(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = machine.watched()
    machine.run(watch, 20)
    monkeypatch.setattr(monitor, "was_connected", {9: True}.get)
    watch.end()
    assert machine.why == []


def test_ranks_that_have_met_or_load_nothing_that_trains_are_no_news(machine: Machine) -> None:
    machine.sockets = CONNECTED
    watch = machine.watched()
    machine.run(watch, 600)
    watch.end()
    machine.sockets, machine.loaded = APART, False
    machine.nodes.messages.clear()
    watch = machine.watched()
    machine.run(watch, 600)
    watch.end()
    assert machine.why == []


def test_a_node_of_which_nothing_is_known_keeps_the_others_from_being_judged(machine: Machine) -> None:
    watch = machine.watched(members=[0, 1], ranks=4)
    machine.run(watch, 400)
    assert machine.why == []
    machine.nodes.publish("links/1", {"ends": {"2": [["s", "t"]], "3": []}, "loaded_s": 300.0, "started": 0})
    machine.run(watch, 100)
    assert "ranks 0, 1, 2 and 3 have no connection" in machine.why[0]


def test_a_launcher_that_gives_no_rank_to_what_it_starts_is_noticed_on_a_single_node(machine: Machine) -> None:
    watch = machine.watched(per_node=True, launched="accelerate launch")
    for _ in range(400):
        machine.now += 1
        watch.look({0: 10})
    assert machine.why[0].startswith("accelerate launch has started none of the 2 ranks")
