"""The addresses of this machine that training could use, and addresses that it cannot, each with the reason."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from pathlib import Path

import psutil

from slurmtrain.model.hostlist import natural_sort_key
from slurmtrain.model.preflight.election import Candidate, ExcludedAddress

# Bridges and tunnels of containers and virtual machines.
_VIRTUAL = re.compile(r"(docker|br-|veth|virbr|cni|flannel|cali|tun|tap|podman|lxc|lxd|kube|wg|vnet|nerdctl)")
_SYSFS = Path("/sys/class/net")
# /sys/class/net/*/type, as in linux/if_arp.h.
_INFINIBAND = 32
_IF_INET6 = Path("/proc/net/if_inet6")
# Flags in it (linux/if_addr.h): temporary, failed duplicate detection, deprecated, tentative.
_UNUSABLE_FLAGS = 0x01 | 0x08 | 0x20 | 0x40


def find_candidates(node: int, pinned: str | None = None) -> tuple[list[Candidate], list[ExcludedAddress]]:
    """The addresses of this machine that training could use, in the order of the interfaces' names, and all others.

    ``node`` is this node's number. ``pinned``: an interface to accept whatever its kind, as long as it is up.
    """
    usable, excluded = [], []
    for interface in sorted(psutil.net_if_addrs(), key=natural_sort_key):
        for entry in sorted(psutil.net_if_addrs()[interface], key=lambda entry: entry.family == socket.AF_INET6):
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            # Without the scope of a link-local address, as in fe80::1%eth0.
            address, prefix = entry.address.partition("%")[0], _prefix(entry.netmask, entry.family)
            reason = _exclusion_reason(interface, address, interface == pinned)
            if reason is None:
                stats = psutil.net_if_stats()[interface]
                usable.append(
                    Candidate(
                        interface=interface,
                        address=address,
                        prefix=prefix,
                        kind="infiniband" if _read_sysfs(interface, "type") == str(_INFINIBAND) else "ethernet",
                        # 0 or less, and 2^32 - 1 in old kernels: unknown.
                        speed_mbps=stats.speed if 0 < stats.speed < 2**31 else None,
                        mtu=stats.mtu,
                    )
                )
            # Every interface has a link-local address, which no user expects to be used: no need to explain its
            # exclusion.
            elif interface != "lo" and not ipaddress.ip_address(address).is_link_local:
                excluded.append(ExcludedAddress(node=node, interface=interface, address=address, reason=reason))
    return usable, excluded


def _prefix(netmask: str | None, family: int) -> int:
    full_length = 32 if family == socket.AF_INET else 128
    return full_length if netmask is None else int(ipaddress.ip_address(netmask)).bit_count()


def _exclusion_reason(interface: str, address: str, pinned: bool) -> str | None:
    """Why an address should not be used for training; None if it may be."""
    parsed = ipaddress.ip_address(address)
    stats = psutil.net_if_stats().get(interface)
    if stats is None or not stats.isup:
        return "the interface is down"
    # psutil's isup is the administrative state: an interface without a cable is up, too.
    if _read_sysfs(interface, "operstate") in ("down", "lowerlayerdown", "notpresent"):
        return "the interface has no carrier"
    if parsed.is_link_local:
        return "a link-local address"
    if not pinned and (parsed.is_loopback or interface == "lo"):
        return "the loopback interface"
    if not pinned and _VIRTUAL.match(interface):
        return "an interface of containers or virtual machines, by its name"
    if parsed.version == 6:
        with contextlib.suppress(OSError):
            for line in _IF_INET6.read_text(encoding="utf-8").splitlines():
                fields = line.split()
                if fields[0] == f"{int(parsed):032x}" and int(fields[4], 16) & _UNUSABLE_FLAGS:
                    return "a temporary, deprecated or unconfirmed address"
    return None


def _read_sysfs(interface: str, name: str) -> str:
    try:
        return (_SYSFS / interface / name).read_text().strip()
    except OSError:
        return ""
