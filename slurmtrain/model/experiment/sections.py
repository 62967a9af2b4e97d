"""The sections `preflight`, `requeue` and `profile` of a spec: checks of nodes, restarts, and traces of steps."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar

from slurmtrain.model.experiment import kinds
from slurmtrain.model.experiment.resources import ResourcesSpec
from slurmtrain.model.experiment.values import (
    Span,
    check_check_name,
    parse_memory,
    parse_span,
    write_duration,
)

# What a failed check does to a node: nothing, a warning, or the node is not used.
LEVELS = ("off", "warn", "fail")
Level = Annotated[str, kinds.level(*LEVELS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleCheck:
    """A check without limits."""

    SHORTHAND: ClassVar = "level"
    level: Level = "fail"
    """`fail`: refuse a node that fails the check; `warn`: only warn; `off`: skip the check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvisoryCheck(SimpleCheck):
    """A check without limits, which only warns by default."""

    level: Level = "warn"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockCheck(SimpleCheck):
    """How much the clocks of nodes may differ."""

    # 50 ms is where monitoring usually warns. torch's rendezvous drops nodes that are 15 s apart: 1 s is far below
    # that, and no clock that a time service keeps is off by so much.
    warn_ms: kinds.Amount = 50
    """Offset from node 0, in milliseconds, at which to warn."""
    fail_ms: kinds.Amount = 1000
    """Offset from node 0, in milliseconds, at which to refuse the node."""

    def conflicts(self) -> Iterator[kinds.Conflict]:
        """Keys that contradict each other, and why."""
        if self.warn_ms is not None and self.fail_ms is not None and self.warn_ms > self.fail_ms:
            problem = f"{self.warn_ms:g} is above fail_ms ({self.fail_ms:g}); a warning must come before a failure"
            yield "warn_ms", f"{problem}: write {self.fail_ms:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCheck(SimpleCheck):
    """Whether nodes reach each other over the network that training will use."""

    timeout_s: Annotated[float, kinds.finite_number(0.1)] = 2
    """Seconds that the test of a connection may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DnsCheck(AdvisoryCheck):
    """How long a reverse lookup of the node's own address may take. Libraries make many, and block on each."""

    # A dead resolver takes 5 to 30 s for each lookup, one that works milliseconds.
    max_ms: kinds.Amount = 1000
    """Milliseconds that the lookup may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCheck(SimpleCheck):
    """Whether all nodes see a file that one of them writes to the run directory."""

    timeout_s: Annotated[float, kinds.finite_number(0.1)] = 10
    """Seconds within which every node must see the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCheck(SimpleCheck):
    """Free space in the run directory."""

    min_gb: kinds.Amount = 1
    """GB that must be free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemporaryCheck(AdvisoryCheck):
    """Free space in TMPDIR, or else /tmp, of each node."""

    min_gb: kinds.Amount = 1
    """GB that should be free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmCheck(AdvisoryCheck):
    """Free space in /dev/shm, through which data loaders and NCCL exchange data."""

    min_gb: kinds.Amount = 1
    """GB that should be free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsCheck(AdvisoryCheck):
    """The kernel's limits for a process."""

    # Data loaders and NCCL hold a descriptor for each worker and each peer; 1024, a common default, is soon used up.
    min_nofile: kinds.Count = 4096
    """Open files per process (`ulimit -n`)."""
    min_memlock_gb: kinds.Amount | None = None
    """GB of locked memory (`ulimit -l`); null: unlimited on networks with RDMA, any limit elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCheck(SimpleCheck):
    """Whether there are as many GPUs as requested, unused, without uncorrected memory errors, and able to multiply."""

    # A CUDA context alone takes some hundred MB; more than this belongs to another process.
    max_used_mb: kinds.Count = 2048
    """MB of a GPU's memory that may be in use before training starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerCheck(AdvisoryCheck):
    """How long a small computation takes, on each GPU or on a CPU core, compared with the median of all nodes."""

    max_ratio: Annotated[float, kinds.finite_number(1)] = 2
    """The limit, as a multiple of the median time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthCheck(SimpleCheck):
    """An all-reduce over the elected network, measured like nccl-tests do. It takes some seconds."""

    level: Level = "off"
    """`fail`: end the attempt if a node is below the limit; `warn`: only warn; `off`: skip the check."""
    size_mb: Annotated[float, kinds.finite_number(0.001)] = 64
    """MB that each rank reduces."""
    min_gb_per_s: kinds.Amount | None = None
    """Required bus bandwidth in GB/s; null: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightSpec:
    """How nodes are checked before training starts. Write a level alone (`dns: off`), or a mapping."""

    exclude: bool = True
    """Whether to start again without nodes that failed a check; Slurm then allocates others."""
    timeout_s: Annotated[float, kinds.finite_number(1)] = 30
    """Seconds that a single check may take."""
    clock: ClockCheck = ClockCheck()
    """Clock offsets between the nodes."""
    network: NetworkCheck = NetworkCheck()
    """Connections between the nodes."""
    port: SimpleCheck = SimpleCheck()
    """The rendezvous port of the training."""
    shared: SharedCheck = SharedCheck()
    """Whether all nodes share the run directory."""
    versions: SimpleCheck = SimpleCheck()
    """Whether Python, torch, CUDA, driver and NCCL are the same on all nodes."""
    gpu: GpuCheck = GpuCheck()
    """GPUs; skipped if none are requested."""
    hardware: SimpleCheck = SimpleCheck()
    """Whether all nodes have the same GPUs, unless `resources.mixed` allows others; without GPUs, the same CPUs."""
    disk: DiskCheck = DiskCheck()
    """Free space in the run directory."""
    tmp: TemporaryCheck = TemporaryCheck()
    """Free space in TMPDIR."""
    shm: ShmCheck = ShmCheck()
    """Free space in /dev/shm."""
    limits: LimitsCheck = LimitsCheck()
    """Limits of a process."""
    dns: DnsCheck = DnsCheck()
    """Reverse lookups of addresses."""
    straggler: StragglerCheck = StragglerCheck()
    """Nodes that are slower than others."""
    environment: AdvisoryCheck = AdvisoryCheck()
    """Variables that are obsolete, or that override what slurmtrain sets."""
    bandwidth: BandwidthCheck = BandwidthCheck()
    """Speed of the network."""
    plugins: Annotated[
        dict[str, str], kinds.Entries(kinds.level(*LEVELS), "mapping of checks to levels", check_check_name)
    ] = field(default_factory=dict)
    """Levels of your own checks, by the names of their entry points; by default `fail`."""


_FACTOR = re.compile(r"x(\d{1,3}(?:\.\d{1,3})?)")


def _factor(*, whole: bool = False) -> kinds.Scalar:
    """How many times as much, such as ``x2``; ``whole``: a batch is divided into whole numbers of parts."""
    name = "whole factor" if whole else "factor"

    def parse(value: object) -> float:
        match = _FACTOR.fullmatch(value) if isinstance(value, str) else None
        factor = float(match[1]) if match else 0.0
        if factor <= 1 or (whole and not factor.is_integer()):
            raise ValueError(f"expected a {name} above 1 such as 'x2', found {value!r}")
        return int(factor) if whole else factor

    return kinds.Scalar(f"{name} such as `x2`", parse, lambda factor: f"x{factor:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OomSpec:
    """What to change when a run ran out of memory: give it more, or divide its batch into smaller parts."""

    mem: Annotated[float, _factor()] = 2.0
    """When a node ran out of memory: start the run again with this multiple of its `resources.mem`, on a cluster in a
    new job."""
    at_most: (
        Annotated[int, kinds.Scalar("amount with a unit, such as `64GB`", parse_memory, lambda mib: f"{mib}M")] | None
    ) = None
    """The limit for `mem`: beyond it the run gets no more memory. null: it never gets more."""
    accumulation: Annotated[int, _factor(whole=True)] | None = None
    """When a GPU ran out of memory, or a node and the run gets no more: start it again with this multiple of its
    `resources.accumulation`. null: the run fails."""
    max_accumulation: Annotated[int, kinds.whole_number(2)] = 16
    """The limit for `accumulation`: beyond it the run fails."""

    @staticmethod
    def require(written: Mapping[str, Any]) -> None:
        """Raise ValueError unless one of the two keys is ``written`` that say what a run may get."""
        # With a mistake in one of them, or in its name, that is what the user meant to say.
        if written.keys() <= {"mem", "max_accumulation"}:
            raise ValueError(
                "nothing says how much more the run may get: set 'at_most', such as '64GB', or "
                "'accumulation', such as 'x2'"
            )


def oom_conflicts(oom: OomSpec | None, resources: ResourcesSpec) -> Iterator[str]:
    """Why a run with these ``resources`` cannot get more memory after it ran out of it, as sentences."""
    if oom is None:
        return
    mem = resources.mem
    if oom.at_most is not None and resources.components:
        yield "'oom.at_most' raises 'resources.mem', but each component has its own: leave it out"
    elif oom.at_most is not None and mem is None:
        yield "'oom.at_most' raises 'resources.mem', which is not set: set it, such as '4GB'"
    elif oom.at_most is not None and mem == 0:
        yield "'oom.at_most' raises 'resources.mem', which is all memory of a node already: leave it out"
    elif oom.at_most is not None and 0 < oom.at_most < (mem or 0):
        yield "'oom.at_most' is less than 'resources.mem'"
    # A wrong number is None.
    if oom.accumulation and (resources.accumulation or 1) > (oom.max_accumulation or math.inf):
        yield "'oom.max_accumulation' is less than 'resources.accumulation'"


# sbatch(1), --signal: the seconds are a number of 16 bits.
_LONGEST_LEAD_S = 65535
EXIT_ZERO = ("auto", "completed")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueSpec:
    """What happens when a run is interrupted. Preemptions, and time limits with progress, do not count."""

    enabled: bool = True
    """Whether an interrupted run is restarted automatically."""
    max_failures: kinds.Count = 3
    """How many crashes and hangs a run survives, including restarts in place, before it fails. `slurmtrain resume`
    resets the count."""
    max_node_failures: kinds.Count = 10
    """How many node failures in a row, without a new checkpoint, a run survives before it fails."""
    restarts_in_place: kinds.Count = 3
    """How often the ranks of an attempt are restarted on the same nodes, without a requeue."""
    backoff_s: kinds.Amount = 30
    """Seconds to wait before a restart after a crash; doubled with each further crash."""
    hang_after: Annotated[float, kinds.finite_number(1)] | None = None
    """Seconds without a finished step that count as a hang; null: ten times the median step, at least a minute."""
    signal: Annotated[str, kinds.choice("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT")] = "SIGTERM"
    """The signal that asks a script without `slurmtrain.session()` to save and exit."""
    lead: (
        Annotated[int, kinds.Scalar("time such as `300s`", partial(parse_span, most=_LONGEST_LEAD_S), write_duration)]
        | None
    ) = None
    """How long before the time limit ranks are asked to stop; null: 90 s on a cluster and 30 s on this machine, a tenth
    of a short limit, and longer if saving is known to take longer."""
    oom: OomSpec | None = None
    """What to change when a run ran out of memory; null: nothing, the run fails."""
    keep_nodes: Span | None = None
    """How long a job keeps its nodes after a failure, so that you can inspect them, before the run starts again or
    fails; null: not at all. Slurm only."""
    exit_zero: Annotated[str, kinds.choice(*EXIT_ZERO)] = "auto"
    """How to take exit code 0 of a script that was asked to stop. auto: it stopped, and the run continues, unless its
    session or trainer reported the work as done; completed: the work is done."""

    @property
    def zero_completes(self) -> bool:
        """Whether exit code 0 means that the work is done, also after a stop request."""
        return self.exit_zero == "completed"


def read_requeue(plain: Mapping[str, Any]) -> RequeueSpec:
    """The section ``requeue`` from what :func:`write_requeue` returned, in this version or another one.

    It comes from a journal: invalid values become defaults, since no user could repair them.
    """
    read = {
        name: kinds.read_all(key.kind, plain[name]) for name, key in kinds.keys_of(RequeueSpec).items() if name in plain
    }
    usable = {name: value for name, (value, mistakes) in read.items() if not mistakes}
    return RequeueSpec(**usable)


def write_requeue(requeue: RequeueSpec) -> dict[str, Any]:
    """The section ``requeue`` as plain data."""
    return dict(kinds.Section(RequeueSpec).write(requeue))


TORCH, NSYS = "torch", "nsys"
_STEPS_EXAMPLE = "write for example [100, 110]"


def _parse_steps(value: Any) -> tuple[int, int]:
    """Two numbers of finished steps, the smaller one first. Raises ValueError."""
    is_pair = isinstance(value, list | tuple) and len(value) == 2 and all(type(each) is int for each in value)
    if not is_pair:
        raise ValueError(f"expected two numbers of steps, found {value!r}; {_STEPS_EXAMPLE}")
    first, last = value
    if not 0 <= first < last:
        raise ValueError(f"expected two numbers of steps, the smaller one first, found {value!r}; {_STEPS_EXAMPLE}")
    return first, last


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSpec:
    """A profile of a few steps by torch, or of the whole command by Nsight Systems: `profile: nsys`."""

    SHORTHAND: ClassVar = "tool"
    tool: Annotated[str, kinds.choice(TORCH, NSYS)] = TORCH
    """`torch`: rank 0 and the slowest rank each write a trace of `steps` for Chrome or Perfetto; needs
    `slurmtrain.session()`. `nsys`: the command of each rank runs under `nsys profile`, which must be installed."""
    steps: (
        Annotated[
            tuple[int, int],
            kinds.Scalar("two numbers of steps, such as `[100, 110]`", _parse_steps, list),
        ]
        | None
    ) = None
    """`torch`: the numbers of finished steps when the trace begins and ends."""

    @staticmethod
    def require(written: Mapping[str, Any]) -> None:
        """Raise ValueError unless it is ``written`` which steps torch's profiler traces."""
        if written.get("tool", TORCH) == TORCH and written.get("steps") is None:
            raise ValueError("set 'steps', such as '[100, 110]', to the steps that are traced")

    def conflicts(self) -> Iterator[kinds.Conflict]:
        """Keys that contradict each other, and why."""
        if self.tool == NSYS and self.steps is not None:
            yield "steps", "nsys records whole ranks: leave 'steps' out, or 'tool: nsys'"
