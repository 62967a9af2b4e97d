"""The programs that a cluster needs, and installing them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .cluster import machine_lock
from .errors import CannotHere
from .processes import find_program, run

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


def require_root(command: str) -> None:
    """Only root can make network namespaces, and end what lives in them."""
    if os.geteuid() != 0:
        raise CannotHere(f"'scripts/cluster {command}' needs root: run it with sudo")


def ensure(more: Mapping[str, str]) -> None:
    """Install what is missing of the programs that every cluster needs, and of ``more``."""
    needed = {**PROGRAMS, **more}
    if not _absent(needed):
        return
    with machine_lock():
        packages = sorted({needed[program] for program in _absent(needed)})
        if packages:
            _install(packages, _absent(needed))
    if absent := _absent(needed):
        names = ", ".join(packages)
        raise CannotHere(f"after installing {names} some programs are still missing: {', '.join(absent)}")


def remove_stale_policy() -> None:
    """Remove our policy-rc.d where a command was killed before it could."""
    if _is_ours(POLICY):
        with machine_lock():
            if _is_ours(POLICY):
                POLICY.unlink()


def _install(packages: list[str], absent: list[str]) -> None:
    names = " ".join(packages)
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
        completed = run([*command, *packages], check=False, timeout=None, environment=environment)
    if completed.returncode != 0:
        message = "\n".join((completed.stdout + completed.stderr).strip().splitlines()[-10:])
        raise CannotHere(f"apt-get could not install {names}:\n{message}")


@contextmanager
def _daemons_forbidden() -> Iterator[None]:
    """Installing a daemon's package starts it, unless there is a policy-rc.d that says no."""
    # In two steps, so that there never is one of ours that lacks our mark.
    new = POLICY.with_name(POLICY.name + ".slurmtrain")
    new.write_text(POLICY_TEXT)
    new.chmod(0o755)
    try:
        os.link(new, POLICY)
    except FileExistsError:
        pass  # the machine has a policy of its own, which stays
    finally:
        new.unlink()
    try:
        yield
    finally:
        if _is_ours(POLICY):
            POLICY.unlink()


def _is_ours(policy: Path) -> bool:
    try:
        return POLICY_MARK in policy.read_text(errors="replace")
    except OSError:
        return False


def _absent(needed: Iterable[str]) -> list[str]:
    return sorted(program for program in needed if find_program(program) is None)
