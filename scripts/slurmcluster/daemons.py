"""Starting the daemons that are not running, each when what it needs is ready."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from .cluster import Cluster, Settings
from .config import CONTROLLER
from .network import NAMESPACES
from .processes import Daemon, find_program, identity, listing, namespace_of, run, start, wait_until

NAMES = ("munged", "mariadbd", "slurmdbd", "slurmctld")
# A busy machine takes its time.
PATIENCE = 120.0


def running(cluster: Cluster) -> dict[str, int]:
    """The pids of the daemons that run; a node's name stands for its slurmd."""
    pids: dict[str, int] = {}
    for pid, arguments in listing(cluster.directory):
        name = os.path.basename(arguments[0])
        if name == "slurmd" and "-N" in arguments:
            # What slurmd forks looks like it for a moment, but is younger.
            pids.setdefault(arguments[arguments.index("-N") + 1], pid)
        elif name in NAMES:
            pids.setdefault(name, pid)
    return pids


def make_database(cluster: Cluster) -> None:
    """Make an empty database, once: the directory gets its name when it is complete."""
    database = cluster.directory / "db"
    if database.exists():
        return
    new = cluster.directory / "db.new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(0o700)
    # --force: also where the machine cannot resolve its own name.
    options = ["--force", "--skip-test-db", "--auth-root-authentication-method=socket"]
    run(["mariadb-install-db", *_database_options(cluster, new), *options], timeout=PATIENCE)
    new.rename(database)


def start_munged(cluster: Cluster) -> None:
    """Authentication, by a key and a socket of the cluster's own."""
    directory = cluster.directory
    options = [
        "--foreground",
        f"--key-file={directory}/keys/munge.key",
        f"--socket={cluster.munge_socket}",
        f"--pid-file={directory}/run/munged.pid",
        f"--seed-file={directory}/keys/munged.seed",
        # Slurm would look the machine's own address up.
        "--origin=127.0.0.1",
    ]
    _start_server(cluster, "munged", options, cluster.munge_socket)


def start_database(cluster: Cluster) -> None:
    """A database of the cluster's own, without TCP."""
    options = [
        *_database_options(cluster, cluster.directory / "db"),
        f"--socket={cluster.database_socket}",
        f"--pid-file={cluster.directory}/run/mariadbd.pid",
        "--skip-networking",
        "--skip-log-bin",
        "--performance-schema=off",
        "--innodb-buffer-pool-size=64M",
        "--innodb-lock-wait-timeout=900",
        "--innodb-flush-log-at-trx-commit=0",
    ]
    _start_server(cluster, "mariadbd", options, cluster.database_socket)


def _database_options(cluster: Cluster, database: Path) -> list[str]:
    """What making and running a database have in common. It need not survive a crash of the machine."""
    # Of its own: when it starts, MariaDB deletes the temporary tables that others have in a shared one.
    temporary = cluster.directory / "tmp"
    temporary.mkdir(0o700, exist_ok=True)
    return [
        "--no-defaults",
        f"--datadir={database}",
        f"--tmpdir={temporary}",
        "--user=root",
        "--innodb-log-file-size=16M",
        "--innodb-flush-method=nosync",
    ]


def start_slurmdbd(cluster: Cluster, settings: Settings) -> None:
    """Slurm's accounting."""
    _start_server(cluster, "slurmdbd", ["-D"], (settings.controller_address, settings.ports[2]))


def start_slurmctld(cluster: Cluster, settings: Settings) -> Daemon:
    """Slurm's controller."""
    options = ["-D", "-f", str(cluster.slurm_conf)]
    return _start_server(cluster, "slurmctld", options, (settings.controller_address, settings.ports[0]))


def start_slurmd(cluster: Cluster, node: str) -> Daemon:
    """A node's slurmd, in its namespace and under its host name."""
    on_node = ["ip", "netns", "exec", cluster.namespace(node), *_as_host(node)]
    arguments = [_program(cluster, "slurmd"), "-D", "-N", node, "-f", str(cluster.slurm_conf)]
    if cluster.has_own_slurm:
        # It would start that of this machine.
        arguments += ["-d", str(cluster.programs / "slurmstepd")]
    return _start(cluster, node, [*on_node, *arguments])


def node_runs(cluster: Cluster, node: str, pids: dict[str, int]) -> bool:
    """Whether a node's slurmd runs, and in the namespace that the node has now."""
    return node in pids and namespace_of(pids[node]) == identity(NAMESPACES / cluster.namespace(node))


def link_programs(cluster: Cluster, programs: Mapping[str, Path]) -> None:
    """Give the cluster these programs, by name, in place of those of this machine."""
    cluster.programs.mkdir(exist_ok=True)
    # sbatch last: once it is there, all are.
    for name, program in sorted(programs.items(), key=lambda item: item[0] == "sbatch"):
        link = cluster.programs / name
        if not link.is_symlink():
            link.symlink_to(program)


def _start_server(cluster: Cluster, name: str, options: list[str], address: Path | tuple[str, int]) -> Daemon:
    """Start a daemon, and wait until it answers."""
    # Slurm's resolve names as the nodes do.
    before = _as_controller(cluster) if isinstance(address, tuple) else []
    daemon = _start(cluster, name, [*before, _program(cluster, name), *options])
    wait_until(lambda: "" if _answers(address) else name, PATIENCE, {cluster.log(name): daemon})
    return daemon


def _start(cluster: Cluster, name: str, arguments: list[str]) -> Daemon:
    # Where slurmdbd finds the database.
    more = {"MYSQL_UNIX_PORT": str(cluster.database_socket)} if name == "slurmdbd" else {}
    return start(arguments, cluster.log(name), {**cluster.environment, **more})


def _program(cluster: Cluster, name: str) -> str:
    """A link to a program in the cluster's directory: its command line then says whose it is."""
    link = cluster.programs / name
    link.parent.mkdir(exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(find_program(name) or name)
    return str(link)


def _as_host(name: str) -> list[str]:
    """What to put before a command so that it runs under another host name."""
    return ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]


def _as_controller(cluster: Cluster) -> list[str]:
    """The same for the controller's: it resolves names as the nodes do, whatever the machine's /etc/hosts says."""
    mounts = 'for file in hosts nsswitch.conf; do mount --bind "$0/$file" "/etc/$file"; done; exec "$@"'
    etc = str(cluster.directory / "etc")
    return ["unshare", "--mount", "--propagation", "slave", "sh", "-c", mounts, etc, *_as_host(CONTROLLER)]


def _answers(address: Path | tuple[str, int]) -> bool:
    family, target = (socket.AF_INET, address) if isinstance(address, tuple) else (socket.AF_UNIX, str(address))
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(2)
        return client.connect_ex(target) == 0
