"""Which address and interface a node uses to meet the others."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import pytest

from slurmtrain.errors import LaunchError
from slurmtrain.runtime import network
from slurmtrain.runtime.network import Place, home, towards

Machine = Callable[..., None]


@dataclass(frozen=True)
class Address:
    family: int
    address: str


@dataclass(frozen=True)
class Stats:
    isup: bool


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Give this machine these interfaces, and a source address for talking to others; a name with ``!`` is down."""

    def have(interfaces: dict[str, list[str]], source: str | None = None) -> None:
        addresses = {
            name.removesuffix("!"): [
                Address(socket.AF_INET6 if ":" in one else socket.AF_PACKET if "-" in one else socket.AF_INET, one)
                for one in its
            ]
            for name, its in interfaces.items()
        }
        stats = {name.removesuffix("!"): Stats(isup=not name.endswith("!")) for name in interfaces}
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
        monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
        monkeypatch.setattr(network, "_source_towards", lambda address: source)
        monkeypatch.setattr(socket, "gethostname", lambda: "node0")

    return have


CLUSTER = {
    "lo": ["127.0.0.1", "::1"],
    "docker0": ["172.17.0.1"],
    "eth0": ["02-00-00-00-00-01", "10.0.0.5", "fe80::1%eth0"],
    "ib0": ["fd00::5", "10.1.0.5"],
    "eth9!": ["10.9.0.5"],
}


# --- node 0 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "interface"), [("10.0.0.5", "eth0"), ("10.1.0.5", "ib0")])
def test_node_0_listens_on_the_interface_of_the_default_route(machine: Machine, source: str, interface: str) -> None:
    machine(CLUSTER, source)
    assert home("auto") == Place(source, interface)


@pytest.mark.parametrize("source", [None, "172.17.0.1", "192.168.0.1"])
def test_without_a_usable_default_route_node_0_listens_on_the_first_real_interface(
    machine: Machine, source: str | None
) -> None:
    machine(CLUSTER, source)
    assert home("auto") == Place("10.0.0.5", "eth0")


@pytest.mark.parametrize(
    "name", ["docker0", "br-12ab", "veth1", "virbr0", "cni0", "flannel.1", "cali1", "tun0", "tap0"]
)
def test_bridges_and_tunnels_are_not_chosen(machine: Machine, name: str) -> None:
    machine({name: ["10.0.0.1"], "zz0": ["10.5.0.1"]}, "10.0.0.1")
    assert home("auto") == Place("10.5.0.1", "zz0")


def test_a_pinned_interface_is_used_whatever_it_is(machine: Machine) -> None:
    machine(CLUSTER, "10.0.0.5")
    assert home("ib0") == Place("10.1.0.5", "ib0")
    assert home("docker0") == Place("172.17.0.1", "docker0")
    assert home("lo") == Place("127.0.0.1", "lo")


@pytest.mark.parametrize("name", ["eth9", "nope"])
def test_a_pinned_interface_that_is_down_or_not_there_is_told_with_those_that_are(machine: Machine, name: str) -> None:
    machine(CLUSTER, "10.0.0.5")
    with pytest.raises(LaunchError, match=f"network.interface is '{name}', which node0.*it has docker0, eth0, ib0"):
        home(name)


def test_a_machine_without_a_real_interface_is_told(machine: Machine) -> None:
    machine({"lo": ["127.0.0.1"], "docker0": ["172.17.0.1"], "eth0": ["fe80::1%eth0", "169.254.3.4"]})
    with pytest.raises(LaunchError, match="node0 has no network interface that other nodes could reach"):
        home("auto")


def test_an_address_of_the_newer_kind_is_chosen_only_where_there_is_no_other(machine: Machine) -> None:
    machine({"eth0": ["fd00::5", "10.0.0.5"]})
    assert home("auto") == Place("10.0.0.5", "eth0")
    machine({"eth0": ["fd00::5"]})
    assert home("auto") == Place("fd00::5", "eth0")


def test_an_interface_without_statistics_is_not_there(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine({"eth0": ["10.0.0.5"], "eth1": ["10.1.0.5"]})
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"eth1": Stats(isup=True)})
    assert home("auto") == Place("10.1.0.5", "eth1")


# --- the other nodes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "interface"), [("10.1.0.5", "ib0"), ("172.17.0.1", "docker0"), ("127.0.0.1", "lo")])
def test_another_node_uses_the_interface_of_its_route_to_node_0(machine: Machine, source: str, interface: str) -> None:
    machine(CLUSTER, source)
    assert towards("10.1.0.1", "auto") == Place(source, interface)


def test_another_node_uses_its_pinned_interface(machine: Machine) -> None:
    machine(CLUSTER, "10.1.0.5")
    assert towards("10.1.0.1", "eth0") == Place("10.0.0.5", "eth0")


@pytest.mark.parametrize("source", [None, "192.168.7.7"])
def test_a_node_without_a_route_to_node_0_is_told(machine: Machine, source: str | None) -> None:
    machine(CLUSTER, source)
    with pytest.raises(LaunchError, match=r"node0 has no route to node 0 at 10\.1\.0\.1"):
        towards("10.1.0.1", "auto")


# --- this machine as it is --------------------------------------------------------------------------------------


def test_the_kernel_is_asked_for_a_route_and_nothing_is_sent() -> None:
    assert network._source_towards("127.0.0.1") == "127.0.0.1"
    assert towards("127.0.0.1", "auto") == Place(*network.LOOPBACK)


def test_a_kernel_that_knows_no_route_gives_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert network._source_towards("10.0.0.1") is None
    assert network._source_towards("fd00::1") is None
