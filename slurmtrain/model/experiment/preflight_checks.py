"""The section ``preflight`` of a spec: the checks of nodes before training starts, and their limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from slurmtrain.model.experiment.kinds import Amount, Conflict, Count, Entries, finite_number, level
from slurmtrain.model.experiment.values import check_check_name

# What a failed check does to a node: nothing, a warning, or the node is not used.
LEVELS = ("off", "warn", "fail")
Level = Annotated[str, level(*LEVELS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleCheck:
    """A check without limits."""

    SHORTHAND: ClassVar = "level"
    level: Level = "fail"
    """`fail`: a node that fails the check is not used; `warn`: only a warning; `off`: the check does not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvisoryCheck(SimpleCheck):
    """A check without limits, which only warns by default."""

    level: Level = "warn"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockCheck(SimpleCheck):
    """How much the clocks of nodes may differ."""

    # 50 ms is where monitoring usually warns. torch's rendezvous drops nodes that are 15 s apart: 1 s is far below
    # that, and no clock that a time service keeps is off by so much.
    warn_ms: Amount = 50
    """Offset from node 0, in milliseconds, at which to warn."""
    fail_ms: Amount = 1000
    """Offset from node 0, in milliseconds, at which to refuse the node."""

    def conflicts(self) -> Iterator[Conflict]:
        """Keys that contradict each other, and why."""
        if self.warn_ms is not None and self.fail_ms is not None and self.warn_ms > self.fail_ms:
            problem = f"{self.warn_ms:g} is above fail_ms ({self.fail_ms:g}); a warning comes before a failure"
            yield "warn_ms", f"{problem}: write {self.fail_ms:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCheck(SimpleCheck):
    """The test that nodes reach each other over the network that training will use."""

    timeout_s: Annotated[float, finite_number(0.1)] = 2
    """Seconds that the test of a connection may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DnsCheck(AdvisoryCheck):
    """How long a reverse lookup of the node's own address may take. Libraries make many, and block on each."""

    # A dead resolver takes 5 to 30 s for each lookup, one that works milliseconds.
    max_ms: Amount = 1000
    """Milliseconds that the lookup may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCheck(SimpleCheck):
    """Whether all nodes see a file that one of them has written to the run directory."""

    timeout_s: Annotated[float, finite_number(0.1)] = 10
    """Seconds within which every node must see the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCheck(SimpleCheck):
    """Free space in the run directory."""

    min_gb: Amount = 1
    """GB that must be free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemporaryCheck(AdvisoryCheck):
    """Free space in TMPDIR, or else /tmp, of each node."""

    min_gb: Amount = 1
    """GB that should be free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmCheck(AdvisoryCheck):
    """Free space in /dev/shm, through which data loaders and NCCL exchange data."""

    min_gb: Amount = 1
    """GB that should be free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsCheck(AdvisoryCheck):
    """The kernel's limits for a process."""

    # Data loaders and NCCL hold a descriptor for each worker and each peer; 1024, a common default, is soon used up.
    min_nofile: Count = 4096
    """Open files per process (`ulimit -n`)."""
    min_memlock_gb: Amount | None = None
    """GB of locked memory (`ulimit -l`); null: unlimited on networks with RDMA, any limit elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCheck(SimpleCheck):
    """GPUs: as many as were requested, without uncorrected memory errors, unused, and able to multiply."""

    # A CUDA context alone takes some hundred MB; more than this belongs to another process.
    max_used_mb: Count = 2048
    """MB of a GPU's memory that may be in use before training starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerCheck(AdvisoryCheck):
    """How long a small computation takes, on each GPU or on a CPU core, compared with the median of all nodes."""

    max_ratio: Annotated[float, finite_number(1)] = 2
    """The limit, as a multiple of the median time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthCheck(SimpleCheck):
    """An all-reduce over the elected network, measured like nccl-tests do. It takes some seconds."""

    level: Level = "off"
    """`fail`: the attempt ends if a node is below the limit; `warn`: only a warning; `off`: the check does not run."""
    size_mb: Annotated[float, finite_number(0.001)] = 64
    """MB that each rank reduces."""
    min_gb_per_s: Amount | None = None
    """GB/s of bus bandwidth that must be reached; null: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightSpec:
    """Checks of the nodes before training starts. Each takes just a level (`dns: off`) or a mapping."""

    exclude: bool = True
    """Whether to continue without nodes that failed a check; Slurm then allocates others."""
    timeout_s: Annotated[float, finite_number(1)] = 30
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
    plugins: Annotated[dict[str, str], Entries(level(*LEVELS), "mapping of checks to levels", check_check_name)] = (
        field(default_factory=dict)
    )
    """Levels of your own checks, by the names of their entry points; by default `fail`."""
