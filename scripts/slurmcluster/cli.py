"""What people type. Standard output carries what was asked for, standard error messages."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Sequence

from . import cluster as clusters
from . import faults, lifecycle, slurm, status
from .accounting import ACCOUNT
from .cluster import MAX_NODES, Cluster, Settings
from .processes import CannotHere, ClusterError, run
from .releases import RELEASES

EPILOG = """exit codes: 0 fine, 1 it failed, 2 the input is wrong, 3 this machine cannot host a cluster.
See docs/cluster.md."""

Command = Callable[[argparse.Namespace, Cluster], str]


class NotUp(ClusterError):
    """Not everything of a cluster is up; the message is what ``status`` prints."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    # Ended by a signal, it still takes away what is only there for a moment.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.umask(0o022)
    parsed = _parser().parse_args(arguments)
    try:
        cluster = clusters.find(parsed.name)
        # Only root can make network namespaces, and end what lives in them.
        if parsed.command not in (_status, _env) and os.geteuid() != 0:
            raise CannotHere("this takes root: run it with sudo")
        print(parsed.command(parsed, cluster))
        return 0
    except NotUp as error:
        print(error)
        return error.exit_code
    except ClusterError as error:
        if parsed.command is _up and error.exit_code == ClusterError.exit_code:
            print(f"cluster: 'up' failed; the logs are in {cluster.directory}/log", file=sys.stderr)
        print(f"cluster: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _up(parsed: argparse.Namespace, cluster: Cluster) -> str:
    begin = time.monotonic()
    requested = {key: getattr(parsed, key) for key in ("nodes", "gpus", "cpus", "grace", "slurm")}
    settings, notes = lifecycle.up(cluster, requested, parsed.user)
    for note in notes:
        print(f"cluster: {note}", file=sys.stderr)
    return _how_to_use(cluster, settings, time.monotonic() - begin)


def _down(_: argparse.Namespace, cluster: Cluster) -> str:
    lifecycle.down(cluster)
    return f"cluster '{cluster.name}' is gone"


def _status(_: argparse.Namespace, cluster: Cluster) -> str:
    settings = cluster.read_settings()
    is_up, text = status.read(cluster, settings) if settings else (False, f"there is no cluster '{cluster.name}'")
    if not is_up:
        raise NotUp(text)
    return text


def _kill_node(parsed: argparse.Namespace, cluster: Cluster) -> str:
    count = lifecycle.kill_node(cluster, parsed.node)
    return f"node{parsed.node} has lost its power: {count} processes ended"


def _start_node(parsed: argparse.Namespace, cluster: Cluster) -> str:
    started = lifecycle.start_node(cluster, parsed.node)
    return f"node{parsed.node} is usable" if started else f"node{parsed.node} was running already; it is usable"


def _break_network(parsed: argparse.Namespace, cluster: Cluster) -> str:
    directions = [parsed.only] if parsed.only else ["in", "out"]
    faults.break_network(cluster, parsed.node, parsed.interface, directions)
    return f"node{parsed.node} loses what goes {' and '.join(directions)} over {parsed.interface}"


def _mend_network(parsed: argparse.Namespace, cluster: Cluster) -> str:
    faults.mend_network(cluster, parsed.node)
    return f"node{parsed.node} loses nothing any more"


def _shift_clock(parsed: argparse.Namespace, cluster: Cluster) -> str:
    faults.shift_clock(cluster, parsed.node, parsed.seconds)
    return f"the clock of node{parsed.node} is {parsed.seconds:g} s ahead, for tasks that start from now on"


def _preempt(parsed: argparse.Namespace, cluster: Cluster) -> str:
    cluster.existing()
    job = slurm.find_running(cluster, parsed.job)
    other = slurm.preempt(cluster, job, parsed.seconds)
    return f"job {job.id} ({job.name}) is being preempted: job {other} wants {job.nodes} for {parsed.seconds} s"


def _env(_: argparse.Namespace, cluster: Cluster) -> str:
    cluster.existing()
    return _export(cluster)


def _how_to_use(cluster: Cluster, settings: Settings, seconds: float) -> str:
    sinfo = run(["sinfo"], environment=cluster.environment).stdout
    made_of = f"{settings.nodes} nodes, each with {settings.cpus} CPUs and {settings.gpus} GPUs"
    return f"""cluster '{cluster.name}' is up, after {seconds:.1f} s: {made_of}

{sinfo}
In each shell that is to use it (account {ACCOUNT}; 'up --user NAME' lets another user in):
{textwrap.indent(_export(cluster), "  ")}

Then, for example, sbatch -N2 --wrap 'srun hostname'; and at the end sudo scripts/cluster down{_option(cluster)}"""


def _option(cluster: Cluster) -> str:
    """What to type so that the command means this cluster."""
    return "" if cluster.name == clusters.DEFAULT_NAME else f" --name {cluster.name}"


def _export(cluster: Cluster) -> str:
    lines = [f"export SLURM_CONF={shlex.quote(str(cluster.slurm_conf))}"]
    if cluster.has_own_slurm:
        lines.append(f'export PATH={shlex.quote(str(cluster.programs))}:"$PATH"')
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/cluster",
        description="Start a real Slurm cluster of several nodes on this machine, and break it on purpose.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--name",
        metavar="NAME",
        help=f"which cluster (default: $SLURMTRAIN_CLUSTER, or {clusters.DEFAULT_NAME}); each has a network of its own",
    )
    node = argparse.ArgumentParser(add_help=False)
    node.add_argument("node", type=_node, metavar="I", help="its number, from 0")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(function: Command, text: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        name = function.__name__.strip("_").replace("_", "-")
        about = text[0].upper() + text[1:] + "."
        command = commands.add_parser(name, parents=[shared, *parents], help=text, description=about)
        command.set_defaults(command=function)
        return command

    up = add(_up, "start a cluster, or what is missing of it")
    for option, metavar, least, most, text in (
        ("nodes", "N", 1, MAX_NODES, "how many nodes"),
        ("gpus", "G", 0, 16, "pretended GPUs of each node"),
        ("cpus", "C", 1, 1000, "pretended CPUs of each node"),
        ("grace", "S", 0, 86400, "seconds from a preemption to the end"),
    ):
        about = f"{text} (default {getattr(Settings, option)})"
        up.add_argument(f"--{option}", type=_count(least, most), metavar=metavar, help=about)
    versions = ", ".join(sorted(RELEASES))
    about = f"which Slurm: {versions}; it is downloaded once (default: that of this machine)"
    up.add_argument("--slurm", choices=sorted(RELEASES), metavar="VERSION", help=about)
    about = "who may submit, besides root and you; repeatable"
    up.add_argument("--user", action="append", default=[], metavar="NAME", help=about)
    add(_down, "end a cluster and remove all that it left")
    add(_status, "show nodes, daemons and jobs; exit code 0 if everything is up")
    add(_kill_node, "cut the power of a node", node)
    add(_start_node, "start a node again and wait until it is usable", node)
    broken = add(_break_network, "lose all packets of one interface of a node, which stays up", node)
    broken.add_argument("interface", metavar="INTERFACE", help="such as hsn0")
    broken.add_argument("--only", choices=("in", "out"), help="in one direction only")
    add(_mend_network, "undo all of break-network on a node", node)
    shifted = add(_shift_clock, "set the clock of a node's tasks ahead or back", node)
    shifted.add_argument("seconds", type=float, metavar="SECONDS", help="how far; 0 puts it right")
    preempt = add(_preempt, "have a running job preempted by one of higher rank on its nodes")
    preempt.add_argument("job", metavar="RUN|JOB", help="a job's id; or a run's id, the beginning of it, or its name")
    about = "how long the nodes are taken (default 20)"
    preempt.add_argument("--seconds", type=_count(1, 14000), default=20, metavar="S", help=about)
    add(_env, "print what a shell must export to use the cluster")
    return parser


def _count(least: int, most: int) -> Callable[[str], int]:
    """An integer in this range."""

    def parse(text: str) -> int:
        if text.isdecimal() and least <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(f"'{text}' is no number from {least} to {most}")

    return parse


def _node(text: str) -> int:
    """A node's number; its name will do."""
    return _count(0, MAX_NODES - 1)(text.removeprefix("node"))
