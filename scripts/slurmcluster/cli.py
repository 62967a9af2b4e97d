"""What people type. Standard output carries what was asked for, standard error messages."""

from __future__ import annotations

import argparse
import json
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
from .errors import ClusterError
from .packages import require_root
from .processes import run
from .releases import RELEASES

EPILOG = """exit codes: 0 fine, 1 it failed, 2 the input is wrong, 3 this machine cannot host a cluster.
See docs/cluster.md."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    # Ended by a signal, it still takes away what is only there for a moment.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.umask(0o022)
    parsed = _parser().parse_args(arguments)
    try:
        return int(parsed.command(parsed, clusters.find(parsed.name)))
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # Whoever read it has seen enough; the interpreter must not complain about it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _up(parsed: argparse.Namespace, cluster: Cluster) -> int:
    require_root("up")
    begin = time.monotonic()
    requested = {key: getattr(parsed, key) for key in ("nodes", "gpus", "cpus", "grace", "slurm")}
    try:
        settings, notes = lifecycle.up(cluster, requested, parsed.user)
    except ClusterError as error:
        if error.exit_code == ClusterError.exit_code:
            print(f"cluster: {error}", file=sys.stderr)
            raise ClusterError(
                f"'up' failed; the logs are in {cluster.directory}/log, and 'scripts/cluster down{_option(cluster)}' "
                "removes all that is there"
            ) from None
        raise
    for note in notes:
        print(f"cluster: {note}", file=sys.stderr)
    print(_how_to_use(cluster, settings, time.monotonic() - begin))
    return 0


def _down(_: argparse.Namespace, cluster: Cluster) -> int:
    require_root("down")
    existed = lifecycle.down(cluster)
    print(f"cluster '{cluster.name}' is gone" if existed else f"there is no cluster '{cluster.name}': nothing to do")
    return 0


def _status(parsed: argparse.Namespace, cluster: Cluster) -> int:
    settings = cluster.read_settings()
    if settings is None:
        print(
            json.dumps({"name": cluster.name, "up": False}) if parsed.json else f"there is no cluster '{cluster.name}'"
        )
        return 1
    current = status.read(cluster, settings)
    print(json.dumps(current.as_json(), indent=2) if parsed.json else "\n".join(current.lines()))
    return 0 if current.up else 1


def _kill_node(parsed: argparse.Namespace, cluster: Cluster) -> int:
    require_root("kill-node")
    count = lifecycle.kill_node(cluster, parsed.node)
    print(f"node{parsed.node} has lost its power: {count} processes ended")
    return 0


def _start_node(parsed: argparse.Namespace, cluster: Cluster) -> int:
    require_root("start-node")
    started = lifecycle.start_node(cluster, parsed.node)
    print(f"node{parsed.node} is usable" if started else f"node{parsed.node} was running already; it is usable")
    return 0


def _break_network(parsed: argparse.Namespace, cluster: Cluster) -> int:
    require_root("break-network")
    directions = [parsed.only] if parsed.only else ["in", "out"]
    faults.break_network(cluster, parsed.node, parsed.interface, directions)
    print(f"node{parsed.node} loses what goes {' and '.join(directions)} over {parsed.interface}")
    return 0


def _mend_network(parsed: argparse.Namespace, cluster: Cluster) -> int:
    require_root("mend-network")
    faults.mend_network(cluster, parsed.node)
    print(f"node{parsed.node} loses nothing any more")
    return 0


def _shift_clock(parsed: argparse.Namespace, cluster: Cluster) -> int:
    require_root("shift-clock")
    faults.shift_clock(cluster, parsed.node, parsed.seconds)
    print(f"the clock of node{parsed.node} is {parsed.seconds:g} s ahead, for tasks that start from now on")
    return 0


def _preempt(parsed: argparse.Namespace, cluster: Cluster) -> int:
    require_root("preempt")
    cluster.existing()
    job = slurm.find_running(cluster, parsed.job)
    other = slurm.preempt(cluster, job, parsed.seconds)
    print(f"job {job.id} ({job.name}) is being preempted: job {other} wants {job.nodes} for {parsed.seconds} s")
    return 0


def _env(_: argparse.Namespace, cluster: Cluster) -> int:
    cluster.existing()
    print(_export(cluster))
    return 0


def _how_to_use(cluster: Cluster, settings: Settings, seconds: float) -> str:
    sinfo = run(["sinfo"], environment=cluster.environment).stdout
    option = _option(cluster)
    made_of = f"nodes: {settings.nodes}, each with {settings.cpus} CPUs and {settings.gpus} GPUs"
    return f"""cluster '{cluster.name}' is up, after {seconds:.1f} s: {made_of}

{sinfo}
In each shell that is to use it (account {ACCOUNT}; 'up --user NAME' lets another user in):
{textwrap.indent(_export(cluster), "  ")}

Then, for example:
  sbatch -N2 --wrap 'srun hostname'
  squeue; sacct -X
  sudo scripts/cluster preempt{option} JOB       # another job takes the nodes of that one
  sudo scripts/cluster kill-node{option} 1       # start-node brings it back
  sudo scripts/cluster down{option}"""


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
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, function: object, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, parents=[shared], help=text, description=text[0].upper() + text[1:] + ".")
        command.set_defaults(command=function)
        return command

    _add_size(add("up", _up, "start a cluster, or what is missing of it"))
    add("down", _down, "end a cluster and remove all that it left")
    show = add("status", _status, "show nodes, daemons and jobs; exit code 0 if everything is up")
    show.add_argument("--json", action="store_true", help="print JSON alone on standard output")
    _add_faults(add)
    add("env", _env, "print what a shell must export to use the cluster")
    return parser


def _add_size(up: argparse.ArgumentParser) -> None:
    """What a cluster is made of, and for whom."""
    up.add_argument(
        "--nodes", type=_count(1, MAX_NODES), metavar="N", help=f"how many nodes (default {Settings.nodes})"
    )
    up.add_argument(
        "--gpus", type=_count(0, 16), metavar="G", help=f"pretended GPUs of each node (default {Settings.gpus})"
    )
    up.add_argument(
        "--cpus", type=_count(1, 1000), metavar="C", help=f"pretended CPUs of each node (default {Settings.cpus})"
    )
    up.add_argument(
        "--grace",
        type=_count(0, 86400),
        metavar="S",
        help=f"seconds from a preemption to the end (default {Settings.grace})",
    )
    up.add_argument(
        "--slurm",
        choices=sorted(RELEASES),
        metavar="VERSION",
        help=f"which Slurm: {', '.join(sorted(RELEASES))}; it is downloaded once (default: that of this machine)",
    )
    up.add_argument(
        "--user", action="append", default=[], metavar="NAME", help="who may submit, besides root and you; repeatable"
    )


def _add_faults(add: Callable[[str, object, str], argparse.ArgumentParser]) -> None:
    """What breaks a cluster on purpose, and mends it. ``add`` makes a command of a name, a function and a help text."""
    for name, function, text in (
        ("kill-node", _kill_node, "cut the power of a node"),
        ("start-node", _start_node, "start a node again and wait until it is usable"),
    ):
        add(name, function, text).add_argument("node", type=_node, metavar="I", help="its number, from 0")
    broken = add("break-network", _break_network, "lose all packets of one interface of a node, which stays up")
    broken.add_argument("node", type=_node, metavar="I", help="its number, from 0")
    broken.add_argument("interface", metavar="INTERFACE", help="such as hsn0")
    broken.add_argument("--only", choices=("in", "out"), help="in one direction only")
    mended = add("mend-network", _mend_network, "undo all of break-network on a node")
    mended.add_argument("node", type=_node, metavar="I", help="its number, from 0")
    shifted = add("shift-clock", _shift_clock, "set the clock of a node's tasks ahead or back")
    shifted.add_argument("node", type=_node, metavar="I", help="its number, from 0")
    shifted.add_argument("seconds", type=float, metavar="SECONDS", help="how far; 0 puts it right")
    preempt = add("preempt", _preempt, "have a running job preempted by one of higher rank on its nodes")
    preempt.add_argument("job", metavar="RUN|JOB", help="a job's id; or a run's id, the beginning of it, or its name")
    preempt.add_argument(
        "--seconds", type=_count(1, 14000), default=20, metavar="S", help="how long the nodes are taken (default 20)"
    )


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
