"""What starts the ranks: slurmtrain (``launcher: ranks``), or the run's command, once per node (``node``, ``none``).

A command that starts with a known launcher, such as torchrun, is started once per node unless the spec says otherwise.
Launchers find the other nodes by environment variables, or by options that are added to the command.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import PurePath
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class NodeRanks:
    """How many ranks each node has that takes part, in the order of the nodes: ranks are counted node by node."""

    counts: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return sum(self.counts)

    @property
    def are_equal(self) -> bool:
        """Whether all nodes have equally many."""
        return len(set(self.counts)) <= 1

    def ranks_of(self, place: int) -> range:
        """The ranks of the node at a ``place`` among the nodes that take part, from 0."""
        first = sum(self.counts[:place])
        return range(first, first + self.counts[place])

    def place_of(self, rank: int) -> int:
        """The place of the node that has a ``rank``."""
        return next(place for place, end in enumerate(accumulate(self.counts)) if rank < end)


RANKS, NODE, NONE = "ranks", "node", "none"
LAUNCHERS = (RANKS, NODE, NONE)

# What a launcher that was asked to stop gives its workers before it kills them: longer than the agent gives it.
_SHUTDOWN_S = 24 * 3600
_TORCHRUN, _ACCELERATE, _DEEPSPEED = "torchrun", "accelerate launch", "deepspeed"
_MODULES = {
    "torch.distributed.run": _TORCHRUN,
    "torch.distributed.launch": _TORCHRUN,
    "accelerate.commands.launch": _ACCELERATE,
    "deepspeed.launcher.runner": _DEEPSPEED,
}
_PYTHON = re.compile(r"python(?:\d+(?:\.\d+)?)?")
_PYTHON_FLAG = re.compile(r"-[bBdEIOqsSuv]+")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh"})
# Options without a value; the word after any other option is taken for its value.
_FLAGS = frozenset(
    {"m", "module", "no_python", "run_path", "standalone", "use_env", "virtual_local_rank",
     "cpu", "multi_gpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm", "use_parallelism_config", "debug", "q",
     "quiet", "enable_cpu_affinity", "same_network", "dynamo_use_dynamic", "dynamo_use_fullgraph",
     "dynamo_use_regional_compilation",
     "no_local_rank", "no_ssh", "no_ssh_check", "force_multi", "save_pid", "elastic_training", "bind_cores_to_rank"}
)  # fmt: skip
# Options of launchers that name a number which the resources decide: processes per node, nodes, all processes.
_PROCS_PER_NODE = {_TORCHRUN: ("nproc_per_node",), _DEEPSPEED: ("num_gpus", "num_accelerators")}
_NODES = {_TORCHRUN: ("nnodes",), _ACCELERATE: ("num_machines",), _DEEPSPEED: ("num_nodes",)}
_WORLD_SIZE = {_ACCELERATE: ("num_processes",)}
_PORTS = ("master_port", "main_process_port", "rdzv_endpoint")
# With one of these accelerate starts several processes per node; without one only where it finds several GPUs.
_ACCELERATE_KINDS = frozenset(
    {"multi_gpu", "config_file", "use_deepspeed", "use_fsdp", "use_megatron_lm", "tpu", "mpirun_hostfile"}
)
# Put between a launcher and the options that the command gives it, which win: argparse takes the last of a kind.
_ADDED = {
    _ACCELERATE: (
        "--num_machines", "{nodes}", "--machine_rank", "{node_rank}", "--num_processes", "{world_size}",
        "--main_process_ip", "{master_addr}", "--main_process_port", "{master_port}",
    ),
    _DEEPSPEED: (
        "--hostfile", "{hostfile}", "--no_ssh", "--node_rank", "{node_rank}",
        "--master_addr", "{master_addr}", "--master_port", "{master_port}",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """Where one of the processes that are started once per node runs, in one round.

    ``node_rank``: number of its node among the training nodes. ``ranks``: how many ranks each process is to start.
    ``interface``, ``address``: of its node, in the network of the run. ``master_addr``, ``master_port``: where its
    ranks meet, on the first node; the port is free there. ``hostfile``: the path of a file with a line ``NAME slots=N``
    for each node.
    """

    node_rank: int
    ranks: NodeRanks
    interface: str
    address: str
    master_addr: str
    master_port: int
    hostfile: str

    @property
    def nodes(self) -> int:
        """How many nodes train."""
        return len(self.ranks.counts)

    @property
    def procs_per_node(self) -> int:
        """How many ranks this node is to start."""
        return self.ranks.counts[self.node_rank]

    def placeholders(self) -> dict[str, str]:
        """The values of a command's placeholders."""
        return {
            "node_rank": str(self.node_rank),
            "nodes": str(self.nodes),
            "procs_per_node": str(self.procs_per_node),
            "world_size": str(self.ranks.world_size),
            "master_addr": self.master_addr,
            "master_port": str(self.master_port),
            "hostfile": self.hostfile,
        }

    def own_variables(self) -> dict[str, str]:
        """The same as environment variables that no library interprets."""
        values = {**self.placeholders(), "first_rank": str(self.ranks.ranks_of(self.node_rank).start)}
        return {f"SLURMTRAIN_{name.upper()}": value for name, value in values.items()}

    def variables(self, stop_signal: str) -> dict[str, str]:
        """What launchers read, for ``launcher: node``.

        torchrun takes the default of each of its options from a variable PET_<OPTION> (torch/distributed/run.py);
        NNODES, NODE_RANK and NPROC_PER_NODE are what scripts that call it use, and Lightning reads NODE_RANK.

        ``stop_signal``: the name of the signal that asks to stop, which torchrun must pass on.
        """
        host = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
        # Signals that torchrun does not handle kill it. By default it handles these, and SIGTERM; but if ranks are
        # stopped by another signal, SIGTERM is ignored in the whole job, and must be by torchrun's workers.
        handled = ",".join(dict.fromkeys([stop_signal, "SIGINT", "SIGHUP", "SIGQUIT"]))
        common = {
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "NODE_RANK": str(self.node_rank),
            "NNODES": str(self.nodes),
            "NPROC_PER_NODE": str(self.procs_per_node),
        }
        return {
            **common,
            **{f"PET_{name}": value for name, value in common.items()},
            "PET_RDZV_ENDPOINT": f"{host}:{self.master_port}",
            "PET_LOCAL_ADDR": self.address,
            "PET_SIGNALS_TO_HANDLE": handled,
            # The agent kills what has not saved in time. By default, torchrun does so after 30 seconds.
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_SHUTDOWN_S),
        }


# The names of the placeholders that only commands started once per node may use.
PLACEHOLDERS = ("node_rank", "nodes", "procs_per_node", "world_size", "master_addr", "master_port", "hostfile")
_PLACEHOLDER = re.compile(rf"\{{({'|'.join(PLACEHOLDERS)})\}}")


@dataclass(frozen=True, slots=True)
class _Launched:
    """A command that starts with a known launcher.

    ``name``: the launcher's. ``end``: how many words name it, with what precedes it. ``options``: its own options, by
    name with underscores; the value of a flag is empty.
    """

    name: str
    end: int
    options: Mapping[str, str]


def split_command(command: str) -> list[str]:
    """The words of a command, as a shell would split it. Raises ValueError where quotes do not match."""
    return list(_split(command))


# The words of a command are needed many times in each run of a sweep, and shlex takes 0.2 s for 200 kB.
@lru_cache(maxsize=128)
def _split(command: str) -> tuple[str, ...]:
    return tuple(shlex.split(command))


def choose_launcher(command: str) -> str:
    """What starts the ranks if the spec does not say it: ``node`` for a known launcher, else ``ranks``."""
    return NODE if _find(command) is not None or _PLACEHOLDER.search(command) else RANKS


def known_launcher(command: str) -> str:
    """The name of the launcher that a command starts with; empty if there is none for sure."""
    launched = _find(command)
    return launched.name if launched is not None else ""


def command_without_env(words: Sequence[str]) -> Sequence[str]:
    """The words of a command without ``env NAME=VALUE`` before it."""
    if not words or words[0].rpartition("/")[2] != "env":
        return words
    return words[next((i for i, word in enumerate(words) if i and not _ASSIGNMENT.match(word)), len(words)) :]


def counts_of_command(command: str, written: Collection[str]) -> dict[str, tuple[str, int]]:
    """How many nodes, and processes on each, the options of a command's launcher say, where the spec does not.

    Args:
        command: the spec's.
        written: the keys of ``resources`` that the spec has.

    Returns:
        The option and its value, by the key of ``resources`` that it takes the place of.
    """
    launched = _find(command)
    if launched is None or "components" in written:
        return {}
    numbers = {
        key: (f"--{name}", int(launched.options[name]))
        for key, table in (("nodes", _NODES), ("procs_per_node", _PROCS_PER_NODE), ("all", _WORLD_SIZE))
        for name in table.get(launched.name, ())
        if launched.options.get(name, "").isdecimal() and int(launched.options[name]) > 0
    }
    option, total = numbers.pop("all", ("", 0))
    nodes = numbers.get("nodes", ("", 1))[1]
    # Where the spec has a number of nodes, that is not known here, and the total cannot be divided.
    if total and "nodes" not in written and total % nodes == 0:
        numbers["procs_per_node"] = (option, total // nodes)
    decided = {*written, *(["procs_per_node"] if "gpus_per_node" in written else [])}
    return {key: number for key, number in numbers.items() if key not in decided}


def add_options(command: str, *, on_own_gpus: bool) -> list[str]:
    """The words of a command with the options by which its launcher finds the other nodes, as placeholders.

    ``command``: it is started once per node. ``on_own_gpus``: there is only one node, with a GPU for each process.
    """
    launched, words = _find(command), split_command(command)
    if launched is None:
        return words
    return [*words[: launched.end], *_added(launched.name, on_own_gpus=on_own_gpus), *words[launched.end :]]


def _added(name: str, *, on_own_gpus: bool) -> Sequence[str]:
    if name == _DEEPSPEED and on_own_gpus:
        # With a hostfile it would number the GPUs itself; without one it takes the GPUs in CUDA_VISIBLE_DEVICES.
        return ("--master_port", "{master_port}")
    return _ADDED.get(name, ())


def find_contradictions(command: str, launcher: str, ranks: NodeRanks) -> Iterator[str]:
    """What a ``command`` says that contradicts the rest of its spec, as sentences without a full stop.

    ``launcher``: who starts the ranks. ``ranks``: how many of them each node has.
    """
    launched = _find(command)
    if launcher == RANKS:
        if names := sorted(set(_PLACEHOLDER.findall(command))):
            yield f"'{{{names[0]}}}' is only for a command that is started once per node: set 'launcher: node'"
        if launched is not None and ranks.world_size > 1:
            counts = " or ".join(map(str, sorted(set(ranks.counts))))
            yield (
                f"with 'launcher: ranks', {launched.name} would be started {counts} times on each node, and each "
                "would start its own ranks: leave 'launcher' out"
            )
    elif launched is not None:
        if launched.name == _ACCELERATE and not ranks.are_equal:
            yield (
                "accelerate starts the same number of processes on each node, and these components have different "
                "numbers: use torchrun, or set the same 'procs_per_node' for all components"
            )
        yield from _contradicting_options(launched, ranks)


def describe_choice(command: str, launcher: str, *, chosen: bool, on_own_gpus: bool) -> Iterator[str]:
    """Notes on who starts the ranks of a ``command``, as sentences without a full stop.

    ``launcher``: who does; ``chosen``: it was derived from the command. ``on_own_gpus``: as for :func:`add_options`.
    """
    launched = _find(command)
    if launcher == NODE and chosen:
        reason = f"'{launched.name}' starts ranks on its own" if launched else "the command has placeholders of a node"
        added = _added(launched.name, on_own_gpus=on_own_gpus) if launched else ()
        options = f", with {' '.join(added)} added to its options" if added else ""
        yield f"{reason}, so it is started once per node{options} ('launcher: node')"
    for name in _PORTS if launched else ():
        if launched is not None and "{" not in launched.options.get(name, "{"):
            yield (
                f"--{name} {launched.options[name]} is a fixed port, and two runs on the same node cannot share it: "
                "leave the option out, and each start gets a free port"
            )
    if launched is not None and launched.options.get("max_restarts", "0") != "0":
        yield (
            f"{launched.name} restarts ranks itself (--max_restarts), without passing them the newest checkpoint: "
            "leave that to slurmtrain (requeue.restarts_in_place)"
        )
    if launched is not None and launched.name == _ACCELERATE and not launched.options.keys() & _ACCELERATE_KINDS:
        yield (
            "without --multi_gpu or a configuration file, accelerate starts several processes only on a node with "
            "several GPUs"
        )


def _contradicting_options(launched: _Launched, ranks: NodeRanks) -> Iterator[str]:
    nodes = len(ranks.counts)
    decided = (
        (_PROCS_PER_NODE, sorted(set(ranks.counts)), "resources.procs_per_node"),
        (_NODES, [nodes], "resources.nodes"),
        (_WORLD_SIZE, [ranks.world_size], "the number of processes on all nodes, from 'resources'"),
    )
    for table, expected, key in decided:
        for name in table.get(launched.name, ()):
            value = launched.options.get(name, "")
            if value.isdecimal() and [int(value)] != expected:
                numbers = " or ".join(map(str, expected))
                yield (
                    f"the command has --{name} {value}, but {key} is {numbers}: leave the option out, and "
                    f"{launched.name} gets the number from slurmtrain"
                )
    if "standalone" in launched.options and nodes > 1:
        yield f"with --standalone each of the {nodes} nodes would train on its own: leave it out"


@lru_cache(maxsize=64)  # asked several times for each run of a sweep
def _find(command: str) -> _Launched | None:
    """The known launcher that a command starts with, also behind ``env NAME=VALUE``; None if there is none for sure."""
    # Behind options of env, such as -u, the program cannot be told for sure: its words are left as they are.
    words = _split(command)
    end = len(words) - len(command_without_env(words)) + 1
    program, name = words[end - 1].rpartition("/")[2] if end <= len(words) else "", ""
    if program in (_TORCHRUN, _DEEPSPEED):
        name = program
    elif program == "accelerate-launch":
        name = _ACCELERATE
    elif program == "accelerate" and words[end : end + 1] == ("launch",):
        name, end = _ACCELERATE, end + 1
    elif _PYTHON.fullmatch(program):
        option = next((at for at in range(end, len(words)) if not _PYTHON_FLAG.fullmatch(words[at])), len(words))
        is_module = words[option : option + 1] == ("-m",)
        name, end = _MODULES.get(words[option + 1] if is_module and option + 1 < len(words) else "", ""), option + 2
    if not name:
        return None
    options: dict[str, str] = {}
    following = iter(words[end:])
    for word in following:
        if not word.startswith("-"):
            break  # the script; what follows are its own arguments
        option_name, equals, value = word.lstrip("-").partition("=")
        option_name = option_name.replace("-", "_")
        options[option_name] = value if equals or option_name in _FLAGS else next(following, "")
    return _Launched(name, end, options)


# What srun or mpirun starts, where its words can be told from their options.
_TRAINER = re.compile(r"python[\d.]*|torchrun|deepspeed|accelerate|(?:ba|da|z|k)?sh")
_WAITS = "would wait for resources that the run's own step holds"
_MPI = frozenset({"mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun"})
# Where a command of a shell begins: a line, what separates commands, an assignment to a variable, a quote.
_BEGIN = (
    r"""(?:^|[;&|({`"'=]|\b(?:exec|time|nohup|then|do|else|env|srun|numactl)\s)\s*"""
    r"(?:[A-Za-z_]\w*=\S*\s+)*(?:[-\w$./{}]*/)?"
)
_CALL = re.compile(
    rf"{_BEGIN}(?P<plain>torchrun|deepspeed|accelerate-launch|srun|mpirun|mpiexec(?:\.hydra)?|orterun)(?=\s|$|[\"'\\])"
    r"|-m\s+(?P<module>torch\.distributed\.(?:run|launch)|accelerate\.commands\.launch|deepspeed\.launcher\.runner)\b"
    r"|\b(?P<accelerate>accelerate\s+launch)\b"
)
# Lines that only mention a program.
_MENTION = re.compile(
    r"\s*(?:#|echo\b|printf\b|module\b|which\b|type\b|command\s+-v\b|(?:\S*\s-m\s+)?pip3?\b|conda\b|uv\b)"
)
# Looking for calls takes time that grows with the square of a line's length.
_LONGEST_LINE = 2000
_TASK = re.compile(r"\$\{?SLURM_(?:PROCID|LOCALID|NTASKS|NPROCS)\b")


class LauncherCall(NamedTuple):
    """A launcher that the text of a shell calls: its ``name``, and the ``line`` from 1."""

    name: str
    line: int


def shell_text(command: str) -> str | None:
    """The text that a command hands to a shell (``bash -c``); None if it does not."""
    words = command_without_env(split_command(command))
    if len(words) < 3 or PurePath(words[0]).name not in SHELLS:
        return None
    at = next((i for i, word in enumerate(words[1:], 1) if re.fullmatch(r"-[a-z]*c", word)), len(words))
    return words[at + 1] if at + 1 < len(words) else None


def shell_script(command: str) -> str | None:
    """The path of the shell script that a command runs; None if it runs none, as far as its words tell."""
    words = command_without_env(split_command(command))
    if not words:
        return None
    if PurePath(words[0]).name not in SHELLS:
        return words[0] if words[0].endswith((".sh", ".bash", ".slurm", ".sbatch")) else None
    rest = [word for word in words[1:] if not word.startswith("-")]
    return rest[0] if rest and shell_text(command) is None else None


def calls_in(text: str) -> list[LauncherCall]:
    """The launchers that the text of a shell calls, each once."""
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > _LONGEST_LINE or _MENTION.match(line):
            continue
        for match in _CALL.finditer(line.split(" #")[0]):
            name = match["plain"] or match["module"] or "accelerate launch"
            # With this option, a step of srun shares the resources of the run's own step, and does not wait.
            if name != "srun" or "--overlap" not in line:
                lines.setdefault(name, number)
    return [LauncherCall(name, line) for name, line in lines.items()]


def problem_of_calls(calls: Sequence[LauncherCall], launcher: str, ranks: int) -> tuple[LauncherCall, str] | None:
    """The first call of a launcher that must not be called there, and what to do; None if all are right.

    Args:
        calls: the calls in the text that each rank runs, or each node.
        launcher: who starts the ranks.
        ranks: how many ranks there are.
    """
    for call in calls:
        if call.name == "srun":
            return call, f"which {_WAITS}: leave srun and its options out, slurmtrain starts the command on each node"
        if launcher == RANKS and ranks > 1:
            other = NONE if call.name in _MPI else "node"
            return call, (
                f"which starts ranks itself, and with 'launcher: ranks' it would be started {ranks} times: set "
                f"'launcher: {other}' to start it once per node"
            )
    return None


def refused_programs(command: str, launcher: str) -> Iterator[str]:
    """What is wrong with a command that begins with srun, sbatch or mpirun, as sentences without a full stop."""
    words = command_without_env(split_command(command))
    program = PurePath(words[0]).name if words else ""
    at = next((at for at, word in enumerate(words[1:], 1) if _TRAINER.fullmatch(PurePath(word).name)), None)
    instead = f"leave {program} and its options out" if at is None else f"write {shlex.join(words[at:])!r}"
    counts = "'resources.nodes' and 'resources.procs_per_node' say how many processes there are"
    if program == "srun" and not (launcher != RANKS and "--overlap" in words):
        yield f"'srun' inside a job {_WAITS}: {instead}; {counts}"
    elif program in ("sbatch", "salloc"):
        yield f"'{program}' would submit another job, but slurmtrain already submits one: {instead}; {counts}"
    elif program in _MPI and launcher == RANKS:
        yield (
            f"'{program}' starts ranks on its own: {instead}, and slurmtrain starts it; {counts}; or set 'launcher: "
            "none' "
            f"to start {program} once per node"
        )


def reads_task_variables(text: str) -> int | None:
    """The line of a shell's text that reads which task this is, which commands per node do not have; None: none."""
    lines = (line.split(" #")[0] for line in text.splitlines())
    return next((number for number, line in enumerate(lines, 1) if _TASK.search(line)), None)
