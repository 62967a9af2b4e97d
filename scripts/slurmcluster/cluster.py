"""Names, places and settings of a cluster.

Everything that a cluster leaves on the machine is named after its directory alone, so that it can be found and removed
whatever became of its records. Only its networks and ports come from ``index``, which is recorded in its settings.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from .processes import PATH, ClusterError, WrongInput

DEFAULT_NAME = "slurmtrain"
# Where the directories of all clusters lie.
ROOT = Path("/var/lib/slurmtrain-cluster")
MAX_INDEX = 200
MAX_NODES = 64
LOCK_TIMEOUT = 300.0
LOCKS = Path("/run")


@dataclass(frozen=True)
class Settings:
    """What a cluster is made of; it does not change while the cluster is there.

    ``slurm``: its version of Slurm, one of ``releases.RELEASES``; empty: that of this machine.
    """

    nodes: int = 4
    gpus: int = 2
    cpus: int = 8
    grace: int = 30
    index: int = 0
    slurm: str = ""

    @property
    def names(self) -> list[str]:
        """The nodes' names."""
        return [f"node{i}" for i in range(self.nodes)]

    @property
    def controller_address(self) -> str:
        """The address of this machine in the slow network."""
        return f"10.57.{self.index}.1"

    def slow_address(self, node: int) -> str:
        """A node's address in the slow network, where Slurm talks."""
        return f"10.57.{self.index}.{10 + node}"

    def fast_address(self, node: int) -> str:
        """A node's address in the fast network."""
        return f"10.58.{self.index}.{10 + node}"

    def fast_interface(self, node: int) -> str:
        """The last node calls it differently, as happens."""
        return "ib0" if node == self.nodes - 1 else "hsn0"

    @property
    def subnets(self) -> tuple[str, str]:
        """The slow and the fast network."""
        return f"10.57.{self.index}.0/24", f"10.58.{self.index}.0/24"

    @property
    def ports(self) -> tuple[int, int, int]:
        """Of slurmctld, slurmd and slurmdbd; below those that the kernel gives to clients."""
        first = 16817 + 10 * self.index
        return first, first + 1, first + 2


@dataclass(frozen=True)
class Cluster:
    """One cluster; ``directory`` holds all its files."""

    name: str
    directory: Path

    @property
    def tag(self) -> str:
        """Stands for it in names of interfaces, which are short."""
        return hashlib.sha256(str(self.directory).encode()).hexdigest()[:6]

    @property
    def namespace_prefix(self) -> str:
        """What the names of its network namespaces begin with."""
        return f"{self.name}-{self.tag}-"

    def namespace(self, node: str) -> str:
        """The network namespace of a node, or of the switch."""
        return self.namespace_prefix + node

    @property
    def switch(self) -> str:
        """The namespace with both bridges: no firewall rule of the machine reaches into it."""
        return self.namespace("switch")

    @property
    def uplink(self) -> str:
        """This machine's own interface in the slow network."""
        return f"st{self.tag}"

    @property
    def slurm_conf(self) -> Path:
        """What SLURM_CONF is set to."""
        return self.directory / "slurm.conf"

    @property
    def programs(self) -> Path:
        """Links to its daemons, and to Slurm's commands unless they are those of this machine."""
        return self.directory / "bin"

    @property
    def has_own_slurm(self) -> bool:
        """Whether its Slurm is not that of this machine."""
        return (self.programs / "sbatch").is_symlink()

    @property
    def environment(self) -> dict[str, str]:
        """What Slurm's programs need to find the cluster, and what finds its programs."""
        variables = {"SLURM_CONF": str(self.slurm_conf)}
        return {**variables, "PATH": f"{self.programs}:{PATH}"} if self.has_own_slurm else variables

    @property
    def munge_socket(self) -> Path:
        """Where munged listens."""
        return self.directory / "run" / "munge.socket"

    @property
    def database_socket(self) -> Path:
        """Where MariaDB listens."""
        return self.directory / "run" / "mariadb.socket"

    def log(self, daemon: str) -> Path:
        """The log of a daemon; a node's name stands for its slurmd."""
        return self.directory / "log" / f"{daemon}.log"

    def read_settings(self) -> Settings | None:
        """The recorded settings; None where there is no cluster, or none that got that far."""
        path = self.directory / "cluster.json"
        try:
            return Settings(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise ClusterError(
                f"{path} is not readable ({error}); run 'scripts/cluster down --name {self.name}'"
            ) from None

    def existing(self) -> Settings:
        """The recorded settings of a cluster that must be there."""
        settings = self.read_settings()
        if settings is None:
            raise WrongInput(
                f"there is no cluster '{self.name}'; start one with 'sudo scripts/cluster up --name {self.name}'"
            )
        return settings

    def node(self, number: int) -> str:
        """The name of a node that must be there."""
        names = self.existing().names
        if number >= len(names):
            raise WrongInput(f"there is no node {number}: cluster '{self.name}' has nodes 0 to {len(names) - 1}")
        return names[number]

    def write_settings(self, settings: Settings) -> None:
        """Record the settings."""
        write_file(self.directory / "cluster.json", json.dumps(asdict(settings)) + "\n")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One command at a time changes a cluster; the directory is made where it is missing."""
        with _lock(self.tag):
            self.directory.mkdir(parents=True, exist_ok=True)
            yield


@contextmanager
def machine_lock() -> Iterator[None]:
    """One command at a time installs packages or chooses an index."""
    with _lock("machine"):
        yield


@contextmanager
def _lock(name: str) -> Iterator[None]:
    """Hold a lock of this machine. It outlives the cluster: a file that is removed locks nobody out.

    The programs that are run under it (not the daemons) inherit it: where this process is killed, the next one waits
    until what was begun has ended.
    """
    path = LOCKS / f"slurmtrain-cluster-{name}.lock"
    with path.open("w") as file:
        os.set_inheritable(file.fileno(), True)
        deadline = time.monotonic() + LOCK_TIMEOUT
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ClusterError("another scripts/cluster has held its lock for minutes; end it first") from None
                time.sleep(0.05)
        yield


def find(name: str | None) -> Cluster:
    """The cluster of a name, by default that of the environment."""
    name = name or os.environ.get("SLURMTRAIN_CLUSTER") or DEFAULT_NAME
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,19}", name):
        raise WrongInput(
            f"'{name}' cannot name a cluster: use at most 20 small letters, digits and '-', a letter first"
        )
    return Cluster(name, ROOT / name)


def write_file(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file as a whole or not at all."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        os.fchmod(file.fileno(), mode)
        file.write(text)
    new.rename(path)
