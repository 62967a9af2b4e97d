"""What attempts have on nodes: packages, machines, variables, a backend of torch; how two attempts differ. Pure.

Also which settings of the shell that submits a run count beside its spec, which comes first. Variables outrank the
lines of a batch script (sbatch(1), "INPUT ENVIRONMENT VARIABLES", 22.05 to 25.11), and a job has the environment of the
shell that submitted it. docs/slurm.md has the reasons for each.

And variables from old recipes that are useless or harmful today, or override slurmtrain's choices. Sources: NCCL's user
guide (2.32), "Environment Variables" and "Networking Troubleshooting"; ProcessGroupNCCL.hpp of torch 2.13;
doc/efa-env-var.md of aws-ofi-nccl. docs/network-profiles.md has the same table for users.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from slurmtrain.model.hostlist import name_some

_FIRST = re.compile(r"# (?P<python>.*), Python (?P<version>.*)")
_LINE = re.compile(r"(?P<name>[^=\s]+)==(?P<version>\S+)(?:  # (?P<detail>.*))?")


@dataclass(frozen=True, slots=True)
class Package:
    """An installed package.

    ``version``: its version. ``detail``: the beginning of the hash of the list of its files, which has their hashes; of
    an editable one its directory, and the revision there; empty if it is not known.
    """

    version: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Software:
    """An interpreter, by its path, its version, and its packages by name."""

    python: str
    version: str
    packages: Mapping[str, Package]

    def to_text(self) -> str:
        """All of it, a package per line, in the syntax of pip's requirements."""
        lines = [f"# {self.python}, Python {self.version}"]
        for name, package in sorted(self.packages.items(), key=lambda item: item[0].lower()):
            lines.append(f"{name}=={package.version}" + (f"  # {package.detail}" if package.detail else ""))
        return "".join(f"{line}\n" for line in lines)

    @classmethod
    def from_text(cls, text: str) -> Software:
        """Read what :meth:`to_text` returned, also in a version that kept no details."""
        first, *lines = text.splitlines() or [""]
        head = _FIRST.fullmatch(first)
        matches = [match for line in lines if (match := _LINE.fullmatch(line))]
        # Other lines are of a newer version.
        packages = {match["name"]: Package(match["version"], match["detail"] or "") for match in matches}
        return cls(head["python"] if head else "", head["version"] if head else "", packages)

    @property
    def hash(self) -> str:
        """The beginning of a hash of :meth:`to_text`, by which nodes find out whether theirs is kept already."""
        return hashlib.sha256(self.to_text().encode()).hexdigest()[:16]


def package_changes(earlier: Software, later: Software) -> Changes:
    """The packages that differ; details count only where both are known.

    Args:
        earlier: An environment.
        later: Another one.
    """
    rebuilt = {
        name
        for name, package in earlier.packages.items()
        if (other := later.packages.get(name)) is not None
        and package.version == other.version
        and package.detail
        and other.detail
        and package.detail != other.detail
    }

    def texts(software: Software) -> dict[str, str]:
        return {
            name: f"{package.version} ({package.detail})" if name in rebuilt else package.version
            for name, package in software.packages.items()
        }

    return changes_between(texts(earlier), texts(later))


Changes: TypeAlias = Mapping[str, tuple[str | None, str | None]]
"""By name: the text in the first, and in the second; None where there is none."""


def changes_between(earlier: Mapping[str, str], later: Mapping[str, str]) -> Changes:
    """What differs, in the order of the names.

    Args:
        earlier: Texts by name.
        later: The others.
    """
    return {
        name: (earlier.get(name), later.get(name))
        for name in sorted(earlier.keys() | later.keys(), key=str.lower)
        if earlier.get(name) != later.get(name)
    }


def changes_in_words(changes: Changes) -> str:
    """Changes in a few words, such as ``torch 2.12 -> 2.13, no numba any more``."""
    texts = []
    for name, (earlier, later) in changes.items():
        text = f"{name} {earlier} -> {later}" if earlier is not None else f"{name} {later} (new)"
        texts.append(text if later is not None else f"{name} removed (was {earlier})")
    return name_some(texts, _MAX_CHANGES)


KINDS = ("python", "versions", "packages", "machines", "variables")
# In the order that a description of a machine has.
_PARTS = ("cpu", "cores", "memory", "gpus", "kernel", "os")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What an attempt had; of what nodes share, what the first of them had.

    ``software``: Python and its packages; None if it is not known. ``versions``: of Python, torch, CUDA and so on.
    ``machines``: the kinds of machine, in words, with how many nodes are one. ``variables``: of the ranks.
    """

    software: Software | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    machines: Mapping[str, int] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


def kinds_of(machines: Iterable[Mapping[str, str]]) -> dict[str, int]:
    """Kinds of machine, in words, with how many of these there are of each.

    Args:
        machines: What each node says of itself.
    """
    kinds: Counter[str] = Counter()
    for machine in machines:
        texts = {**machine, "cores": f"{machine['cores']} cores" if machine.get("cores") else ""}
        kinds[", ".join(texts[part] for part in _PARTS if texts.get(part))] += 1
    return dict(sorted(kinds.items()))


def compare_environments(earlier: Environment, later: Environment) -> dict[str, Changes]:
    """What differs, by :data:`KINDS`, where anything does.

    Args:
        earlier: What an attempt had.
        later: What another one had.
    """
    changes: dict[str, Changes] = {"versions": changes_between(earlier.versions, later.versions)}
    if earlier.software is not None and later.software is not None:
        changes["packages"] = package_changes(earlier.software, later.software)
        pythons = ({"python": software.python} for software in (earlier.software, later.software))
        changes["python"] = changes_between(*pythons)
    if earlier.machines and later.machines:
        changes["machines"] = changes_between(_counted(earlier.machines), _counted(later.machines))
    if earlier.versions and later.versions:
        changes["variables"] = changes_between(earlier.variables, later.variables)
    else:
        # One of them is of a version that noted none of this.
        del changes["versions"]
    return {kind: changes[kind] for kind in KINDS if changes.get(kind)}


def _counted(machines: Mapping[str, int]) -> dict[str, str]:
    return {"nodes": "; ".join(f"{count} x ({kind})" for kind, count in machines.items())}


GLOO, NCCL = "gloo", "nccl"
# How many changes a line names, and how many hosts a reason.
_MAX_CHANGES = 5
_MAX_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHardware:
    """What a rank computes on and communicates by."""

    host: str
    """The name of its node."""
    name: str
    """The name of its GPU, or ``CPU``."""
    has_gpu: bool
    """Whether it computes on a GPU."""
    library: str = ""
    """Which library its torch is built with: ``NCCL``, or ``RCCL`` for GPUs of AMD; empty if with none."""
    version: str = ""
    """The version of that library."""


@dataclass(frozen=True, slots=True)
class ElectedBackend:
    """The backend for tensors on GPUs, and why, as a phrase."""

    name: str
    why: str


def elect_backend(ranks: Sequence[RankHardware]) -> ElectedBackend:
    """NCCL if all of these ranks can use it with each other, else gloo, which also reduces tensors on GPUs.

    NCCL connects GPUs of any generations that its build supports, but refuses peers with another version of itself
    ("Mismatched NCCL version detected", init.cc of NCCL 2). Whether torch supports a GPU at all is for preflight, which
    multiplies matrices on each.

    Args:
        ranks: The hardware of each.
    """
    with_gpu = [rank for rank in ranks if rank.has_gpu]
    if not with_gpu:
        return ElectedBackend(GLOO, "no process has a GPU")
    # NCCL needs a GPU in each process.
    if len(with_gpu) < len(ranks):
        return ElectedBackend(GLOO, f"processes have no GPU on {_hosts_of(rank for rank in ranks if not rank.has_gpu)}")
    libraries = list(dict.fromkeys((rank.library, rank.version) for rank in ranks))
    if libraries == [("", "")]:
        return ElectedBackend(GLOO, "torch is built without NCCL")
    if len(libraries) == 1:
        return ElectedBackend(NCCL, "all processes have {} {}".format(*libraries[0]))
    holders = []
    for library, version in libraries:
        hosts = _hosts_of(rank for rank in ranks if (rank.library, rank.version) == (library, version))
        holders.append(f"{f'{library} {version}' if library else 'no NCCL'} on {hosts}")
    return ElectedBackend(GLOO, f"there is {'; '.join(holders)}")


def _hosts_of(ranks: Iterable[RankHardware]) -> str:
    """The hosts of some ``ranks``."""
    return name_some(list(dict.fromkeys(rank.host for rank in ranks)), _MAX_NAMED)


SBATCH_PREFIX = "SBATCH_"
# The variable of any other option has the option's own name.
_OPTION_NAMES = {
    "ARRAY_INX": "array", "BURST_BUFFER": "bb", "CPU_FREQ_REQ": "cpu-freq", "DEBUG": "verbose", "MEM_PER_NODE": "mem",
    "REQ_SWITCH": "switches", "SEGMENT_SIZE": "segment", "TIMELIMIT": "time", "WAIT4SWITCH": "switches",
}  # fmt: skip
# Options that say where a job goes and who pays for it: a person's or a site's default, if the spec names none.
PLACES = frozenset({"account", "bb", "constraint", "network", "partition", "qos", "reservation", "segment", "wckey"})
# Keys of the spec that a person may miss who has set one of these options by a variable, which has no effect.
_SPEC_KEYS = {
    "cpus-per-gpu": "resources.cpus_per_proc", "gpus": "resources.gpus_per_node",
    "gpus-per-node": "resources.gpus_per_node", "gpus-per-socket": "resources.gpus_per_node",
    "gpus-per-task": "resources.gpus_per_node", "mem": "resources.mem", "mem-per-cpu": "resources.mem",
    "mem-per-gpu": "resources.mem", "time": "resources.time", "tres-per-task": "resources.gpus_per_node",
}  # fmt: skip
# Options that slurmtrain sets whatever the spec says, or that concern sbatch's own output and environment.
_OURS = frozenset(
    {"array", "clusters", "error", "export", "get-user-env", "ignore-pbs", "input", "job-name", "mem-bind", "no-kill",
     "no-requeue", "open-mode", "output", "requeue", "signal", "umask", "verbose", "wait"}
)  # fmt: skip
# Variables that name GPUs of the machine where a run is submitted; Slurm gives the job other GPUs.
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "HIP_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES",
                 "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")  # fmt: skip
# Variables that reach the ranks, and decide which code they run or how.
_TELLING = ("PYTHONPATH", "PYTHONHOME", "PYTHONOPTIMIZE", "PYTHONWARNINGS", "LD_PRELOAD", "MKL_NUM_THREADS",
            "NUMEXPR_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY",
            "KMP_AFFINITY")  # fmt: skip


def option_of(variable: str) -> str:
    """The option of sbatch that a variable stands for, or would; empty if it does not begin as these do."""
    if not variable.startswith(SBATCH_PREFIX):
        return ""
    name = variable.removeprefix(SBATCH_PREFIX)
    return _OPTION_NAMES.get(name, name.lower().replace("_", "-"))


def places(environ: Mapping[str, str], own: Collection[str]) -> dict[str, str]:
    """The variables by which this environment says where a job goes, as far as the spec leaves that open.

    Args:
        environ: the environment of the command that submits.
        own: the options of sbatch that the spec sets.
    """
    return {
        name: value
        for name, value in sorted(environ.items())
        # A value with a line break would end its line of the batch script.
        if (option := option_of(name)) in PLACES and option not in own and value.isprintable() and value.strip()
    }


def place_options(variables: Mapping[str, str]) -> dict[str, str]:
    """Values of options of sbatch, by the variables that stand for them; other variables are left out."""
    return {option: value for name, value in variables.items() if (option := option_of(name)) in PLACES}


def telling(environ: Mapping[str, str], own: Collection[str]) -> dict[str, str]:
    """The variables that decide what the ranks run or how, unless the spec sets them.

    Args:
        environ: the environment of the command that submits.
        own: the variables that the spec sets.
    """
    return {name: environ[name] for name in _TELLING if environ.get(name) and name not in own}


def without_effect(environ: Mapping[str, str], own: Collection[str], options: Collection[str]) -> Iterator[str]:
    """Variables that sbatch would have followed and that have no effect, each with what to write instead.

    Variables that stand for a setting of the spec, or that slurmtrain sets itself, are left out.

    Args:
        environ: the environment of the command that submits.
        own: the options of sbatch that the spec sets, and its keys that have a value.
        options: all options of sbatch.
    """
    for name, value in sorted(environ.items()):
        option = option_of(name)
        if option == "clusters" or name == "SLURM_CLUSTERS":
            yield f"{name}={value} (runs go to the cluster of this machine)"
        # What the spec sets, and what counts anyway, is no surprise.
        elif option in own or option in PLACES or option in _OURS or option not in options:
            continue
        elif (key := _SPEC_KEYS.get(option, f"slurm.{option}")) and key not in own:
            yield f"{name}={value} (write {key} into the spec)"
    if environ.get("CUDA_VISIBLE_DEVICES"):
        yield "CUDA_VISIBLE_DEVICES (Slurm chooses the GPUs)"


def describe_variables(variables: Mapping[str, str]) -> str:
    """Variables that count, in a line, with the options that they stand for."""
    return ", ".join(
        f"{name}={value}" + (f" (--{option})" if (option := option_of(name)) else "")
        for name, value in variables.items()
    )


_TORCH = {
    "NCCL_ASYNC_ERROR_HANDLING": "is TORCH_NCCL_ASYNC_ERROR_HANDLING since torch 2.2, which the agent sets to 1; "
    "leave it out",
    "NCCL_BLOCKING_WAIT": "is TORCH_NCCL_BLOCKING_WAIT since torch 2.2",
    "NCCL_DESYNC_DEBUG": "is TORCH_NCCL_DESYNC_DEBUG since torch 2.2",
    "NCCL_ENABLE_TIMING": "is TORCH_NCCL_ENABLE_TIMING since torch 2.2",
    "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "is TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK since torch 2.2",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "has no effect since torch 2.8; leave it out",
}
_NCCL = {
    "NCCL_IB_GID_INDEX": "keeps NCCL (since 2.21) from finding each card's RoCE v2 address itself; leave it out",
    "NCCL_MIN_NCHANNELS": "is deprecated since NCCL 2.17; leave it out, or use NCCL_MIN_CTAS",
    "NCCL_MAX_NCHANNELS": "is deprecated since NCCL 2.17; leave it out, or use NCCL_MAX_CTAS",
    "NCCL_MIN_NRINGS": "was renamed in NCCL 2.5 and is deprecated since 2.17; leave it out, or use NCCL_MIN_CTAS",
    "NCCL_MAX_NRINGS": "was renamed in NCCL 2.5 and is deprecated since 2.17; leave it out, or use NCCL_MAX_CTAS",
    "NCCL_BUFFSIZE": "is for debugging; values from older versions of NCCL cost speed or memory today; leave it out",
    "NCCL_TREE_THRESHOLD": "has no effect since NCCL 2.5, which chooses between trees and rings itself; leave it out",
    "NCCL_LL_THRESHOLD": "has no effect since NCCL 2.5, which chooses the protocol itself; leave it out",
    "NCCL_SINGLE_RING_THRESHOLD": "has no effect since NCCL 2.3; leave it out",
    "NCCL_IB_CUDA_SUPPORT": "has no effect since NCCL 2.4; leave it out, or use NCCL_NET_GDR_LEVEL",
    "NCCL_IB_GDR_LEVEL": "is NCCL_NET_GDR_LEVEL since NCCL 2.4; leave it out, or use that",
}
_EFA = {
    "FI_EFA_USE_DEVICE_RDMA": "is not needed since libfabric 1.18 with aws-ofi-nccl 1.7; leave it out",
    "FI_EFA_FORK_SAFE": "is set by aws-ofi-nccl itself since 1.2; leave it out",
    "FI_EFA_ENABLE_SHM_TRANSFER": "has no effect with aws-ofi-nccl, which forbids such transfers; leave it out",
    "RDMAV_FORK_SAFE": "can break RDMA on newer kernels; leave it out, NCCL and aws-ofi-nccl handle forks themselves",
}
OBSOLETE: Mapping[str, str] = {**_TORCH, **_NCCL, **_EFA}

# With these values a variable only repeats the default.
_HARMLESS = {"NCCL_IB_GID_INDEX": "-1"}
# Google's scripts set NCCL's variables for Google's plugins, which check them; these name the plugins.
_GIB = "gib"
_SHIM = "NCCL_SHIMNET_GUEST_CONFIG_CHECKER_CONFIG_FILE"

_INTERFACE = "name the interface in network.interface instead"
_SET_BY_US = {
    "NCCL_SOCKET_IFNAME": _INTERFACE,
    "GLOO_SOCKET_IFNAME": _INTERFACE,
    "TP_SOCKET_IFNAME": _INTERFACE,
    "MASTER_ADDR": "leave it out",
    "MASTER_PORT": "leave it out",
    "RANK": "leave it out, it differs in each process",
    "LOCAL_RANK": "leave it out, it differs in each process",
    "WORLD_SIZE": "leave it out, it follows from resources",
}


def describe_obsolete(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that is obsolete or does harm, with what to do instead and since when.

    What Google's scripts set for NCCL on their machines is ignored: it belongs to their plugins.
    """
    present = [name for name in OBSOLETE if environ.get(name) not in (None, "", _HARMLESS.get(name))]
    if environ.get("NCCL_NET", "").lower() == _GIB or _SHIM in environ:
        present = [name for name in present if name not in _NCCL]
    others = sorted(name for name in environ if name.startswith("RDMAV_") and name not in OBSOLETE)
    return [
        *(f"{name} {OBSOLETE[name]}." for name in present),
        *(f"{name} should not be set; leave it out, NCCL and libfabric choose by themselves." for name in others),
    ]


def describe_overruled(environ: Mapping[str, str], set_by_us: Mapping[str, str]) -> list[str]:
    """A sentence for each variable of a spec's ``env`` that differs from slurmtrain's own setting in ``set_by_us``."""
    sentences = []
    for name, advice in _SET_BY_US.items():
        value, ours = environ.get(name), set_by_us.get(name)
        if value is not None and value != ours:
            chosen = f"but slurmtrain sets it to {ours!r}" if ours is not None else "but slurmtrain sets it"
            sentences.append(f"{name} is {value!r} in env, {chosen}; {advice}.")
    return sentences
