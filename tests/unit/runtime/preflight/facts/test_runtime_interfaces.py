"""The addresses of a machine that training could use, and those that are left out."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from slurmtrain.model.preflight.election import Candidate
from slurmtrain.runtime.preflight.facts import interfaces
from slurmtrain.runtime.preflight.facts.interfaces import find_candidates
from slurmtrain.runtime.preflight.ports import listen


@dataclass(frozen=True)
class Card:
    """An interface, with ``address/netmask`` texts; of ``files``, what is not given cannot be read."""

    addresses: tuple[str, ...]
    up: bool = True
    speed: int = 1000
    mtu: int = 1500
    operstate: str | None = "up"
    type: str | None = "1"


@dataclass(frozen=True)
class Address:
    family: int
    address: str
    netmask: str | None


@dataclass(frozen=True)
class Stats:
    isup: bool
    speed: int
    mtu: int


Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Give this machine these interfaces, and flags to addresses of IPv6."""

    def set_interfaces(flags: dict[str, int] | None = None, **cards: Card) -> None:
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: {name: _addresses(card) for name, card in cards.items()})
        stats = {name: Stats(card.up, card.speed, card.mtu) for name, card in cards.items()}
        monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
        monkeypatch.setattr(interfaces, "_SYSFS", tmp_path)
        for name, card in cards.items():
            (tmp_path / name).mkdir()
            for file in ("operstate", "type"):
                if (text := getattr(card, file)) is not None:
                    (tmp_path / name / file).write_text(f"{text}\n")
        lines = [
            f"{socket.inet_pton(socket.AF_INET6, address).hex()} 02 40 00 {flag:02x} eth0"
            for address, flag in (flags or {}).items()
        ]
        monkeypatch.setattr(interfaces, "_IF_INET6", tmp_path / "if_inet6")
        (tmp_path / "if_inet6").write_text("\n".join(lines))

    return set_interfaces


def _addresses(card: Card) -> list[Address]:
    candidates = []
    for text in card.addresses:
        address, _, netmask = text.partition("/")
        family = socket.AF_PACKET if "-" in address else socket.AF_INET6 if ":" in address else socket.AF_INET
        candidates.append(Address(family, address, netmask or None))
    return candidates


ETH0 = Card(("02-00-00-00-00-01", "10.0.0.5/255.255.255.0"))
V6 = "fd00::5/ffff:ffff:ffff:ffff::"


def exclusion_reasons(node: int = 0, pinned: str | None = None) -> dict[str, str]:
    """The reasons, by address; nothing else is there."""
    candidates, excluded = find_candidates(node, pinned)
    assert candidates == []
    return {address.address: address.reason for address in excluded}


# --- what can be used -------------------------------------------------------------------------------------------


def test_a_candidate_has_the_facts_of_the_kernel(machine: Machine) -> None:
    machine(eth0=replace(ETH0, speed=25_000, mtu=9000), ib0=Card(("10.1.0.5/255.255.0.0",), speed=200_000, type="32"))
    assert find_candidates(0) == (
        [
            Candidate(interface="eth0", address="10.0.0.5", prefix=24, speed_mbps=25_000, mtu=9000),
            Candidate(interface="ib0", address="10.1.0.5", prefix=16, speed_mbps=200_000, kind="infiniband"),
        ],
        [],
    )


@pytest.mark.parametrize(
    ("card", "flags", "addresses"),
    [
        *((replace(ETH0, operstate=state, type=None), {}, ["10.0.0.5"]) for state in ("up", "unknown", None)),
        # A scope is no part of an address.
        (Card(("fd00::5%eth0/ffff:ffff:ffff:ffff::",)), {}, ["fd00::5"]),
        # A permanent address.
        *((Card((V6,)), {"fd00::1:5": 0x01, "fd00::5": flag}, ["fd00::5"]) for flag in (0x00, 0x80, 0x02)),
        # Link-local addresses.
        (Card(("fe80::1%eth0/ffff:ffff:ffff:ffff::", "169.254.7.1/255.255.0.0")), {}, []),
    ],
)
def test_addresses_that_others_can_reach_are_used_and_no_others(
    machine: Machine, card: Card, flags: dict[str, int], addresses: list[str]
) -> None:
    machine(flags, eth0=card)
    candidates, excluded = find_candidates(0)
    assert ([candidate.address for candidate in candidates], excluded) == (addresses, [])
    assert [candidate.address for candidate in find_candidates(0, "eth0")[0]] == addresses


# --- what cannot ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "reason"),
    [
        (replace(ETH0, up=False), "the interface is down"),
        (replace(ETH0, operstate="down"), "the interface has no carrier"),
        (replace(ETH0, operstate="lowerlayerdown"), "the interface has no carrier"),
    ],
)
@pytest.mark.parametrize("pinned", [None, "eth0"])
def test_an_interface_without_a_carrier_is_excluded_even_if_it_is_pinned(
    machine: Machine, card: Card, reason: str, pinned: str | None
) -> None:
    machine(eth0=card)
    assert exclusion_reasons(pinned=pinned) == {"10.0.0.5": reason}
    [excluded] = find_candidates(7, pinned)[1]
    assert (excluded.node, excluded.interface) == (7, "eth0")


def test_an_interface_that_disappears_meanwhile_is_down_and_loopback_addresses_are_excluded(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(dummy0=Card(("127.5.0.1",)))
    assert exclusion_reasons() == {"127.5.0.1": "the loopback interface"}
    monkeypatch.setattr(psutil, "net_if_stats", dict)
    assert exclusion_reasons() == {"127.5.0.1": "the interface is down"}


@pytest.mark.parametrize(
    "name",
    ["docker0", "br-12ab", "veth1a", "virbr0", "cni0", "flannel.1", "cali12", "tunl0", "tap0", "podman1", "lxcbr0",
     "lxdbr0", "kube-ipvs0", "wg0", "vnet3", "nerdctl0"],
)  # fmt: skip
def test_interfaces_of_containers_are_excluded_unless_they_are_pinned(machine: Machine, name: str) -> None:
    machine(**{name: ETH0})
    assert exclusion_reasons() == {"10.0.0.5": "an interface of containers or virtual machines, by its name"}
    assert [candidate.interface for candidate in find_candidates(0, name)[0]] == [name]


def test_the_loopback_interface_is_ignored_unless_it_is_pinned(machine: Machine) -> None:
    machine(lo=Card(("127.0.0.1/255.0.0.0", "::1", "10.5.0.1"), operstate="unknown"))
    assert find_candidates(0) == ([], [])
    assert [candidate.address for candidate in find_candidates(0, "lo")[0]] == ["127.0.0.1", "10.5.0.1", "::1"]


@pytest.mark.parametrize("flag", [0x01, 0x08, 0x20, 0x40, 0x41, 0xA0])
def test_a_temporary_ipv6_address_is_excluded(machine: Machine, flag: int) -> None:
    machine({"fd00::5": flag}, eth0=Card((V6,)))
    assert exclusion_reasons() == {"fd00::5": "a temporary, deprecated or unconfirmed address"}


# --- this machine -----------------------------------------------------------------------------------------------


def test_every_candidate_of_this_machine_can_be_listened_on() -> None:
    candidates, _ = find_candidates(0, "lo")
    assert "127.0.0.1" in {candidate.address for candidate in candidates}
    for candidate in candidates:
        listen(candidate.address, 0).close()
        assert 0 < candidate.prefix <= (32 if candidate.family == 4 else 128)
        assert candidate.mtu >= 576
