"""The programs that a cluster needs, and installing them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .cluster import machine_lock, write_file
from .processes import CannotHere, find_program, last_words, run

# Each program, with the package that brings it on Debian and Ubuntu.
OF_SLURM = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurmdbd": "slurmdbd",
    "sbatch": "slurm-client",
    "sacctmgr": "slurm-client",
}
# What a Slurm that is not installed is unpacked and patched with.
OF_RELEASES = {"dpkg-deb": "dpkg", "patchelf": "patchelf"}
PROGRAMS = {
    "munged": "munge",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "hostname": "hostname",
    "nft": "nftables",
    "faketime": "faketime",
}
POLICY = Path("/usr/sbin/policy-rc.d")
POLICY_MARK = "# written by slurmtrain's scripts/cluster"
POLICY_TEXT = f"#!/bin/sh\n{POLICY_MARK} while it installs packages: their daemons are not to start\nexit 101\n"


def ensure(more: Mapping[str, str]) -> None:
    """Install what is missing of the programs that every cluster needs, and of ``more``."""
    needed = {**PROGRAMS, **more}
    if _absent(needed):
        with machine_lock():
            if absent := _absent(needed):
                _install(" ".join(sorted({needed[program] for program in absent})), absent)
    if absent := _absent(needed):
        raise CannotHere(f"after installing their packages some programs are still missing: {', '.join(absent)}")


def remove_stale_policy() -> None:
    """Remove our policy-rc.d where a command was killed before it could."""
    if _is_ours(POLICY):
        with machine_lock():
            if _is_ours(POLICY):
                POLICY.unlink()


def _install(names: str, absent: list[str]) -> None:
    if find_program("apt-get") is None:
        raise CannotHere(
            f"these programs are missing: {', '.join(absent)}; this is no Debian or Ubuntu: install them yourself "
            f"(there the packages are {names})"
        )
    print(f"cluster: installing {names} (about a minute)", file=sys.stderr, flush=True)
    environment = {key: value for key, value in os.environ.items() if key != "PATH"}
    environment["DEBIAN_FRONTEND"] = "noninteractive"
    # --no-remove: nothing that is installed may have to go, such as MySQL for MariaDB.
    command = ["apt-get", "-o", "DPkg::Lock::Timeout=120", "install", "-y", "--no-install-recommends", "--no-remove"]
    with _daemons_forbidden():
        run(["apt-get", "update"], check=False, timeout=None, environment=environment)
        completed = run([*command, *names.split()], check=False, timeout=None, environment=environment)
    if completed.returncode != 0:
        raise CannotHere(f"apt-get could not install {names}:\n{last_words(completed)}")


@contextmanager
def _daemons_forbidden() -> Iterator[None]:
    """Installing a daemon's package starts it, unless there is a policy-rc.d that says no."""
    # The machine may have a policy of its own, which stays. There never is one of ours that lacks our mark.
    if not POLICY.exists():
        write_file(POLICY, POLICY_TEXT, 0o755)
    try:
        yield
    finally:
        if _is_ours(POLICY):
            POLICY.unlink()


def _is_ours(policy: Path) -> bool:
    return policy.exists() and POLICY_MARK in policy.read_text(errors="replace")


def _absent(needed: Iterable[str]) -> list[str]:
    return sorted(program for program in needed if find_program(program) is None)
