"""The section ``preflight`` of a spec: the checks of nodes before training starts, and their limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slurmtrain.model.spec import kinds
from slurmtrain.model.spec.kinds import Conflict, Entries, LevelSection, Nullable, declare_key
from slurmtrain.model.spec.values import check_check_name

# What a failed check does to a node: nothing, a warning, or the node is not used.
LEVELS = ("off", "warn", "fail")


def _declare_level(default: str) -> Any:
    """The key ``level`` of a check."""
    return declare_key(
        default,
        kinds.level(*LEVELS),
        "`fail`: a node that fails the check is not used; `warn`: only a warning; `off`: the check does not run.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleCheck:
    """A check without limits."""

    level: str = _declare_level("fail")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvisoryCheck:
    """A check without limits, which only warns by default."""

    level: str = _declare_level("warn")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockCheck:
    """How much the clocks of nodes may differ."""

    level: str = _declare_level("fail")
    # 50 ms is where monitoring usually warns. torch's rendezvous drops nodes that are 15 s apart: 1 s is far below
    # that, and no clock that a time service keeps is off by so much.
    warn_ms: float = declare_key(50, kinds.finite_number(0), "Offset from node 0, in milliseconds, at which to warn.")
    fail_ms: float = declare_key(
        1000, kinds.finite_number(0), "Offset from node 0, in milliseconds, at which to refuse the node."
    )

    def conflicts(self) -> Iterator[Conflict]:
        """Keys that contradict each other, and why."""
        if self.warn_ms is not None and self.fail_ms is not None and self.warn_ms > self.fail_ms:
            problem = f"{self.warn_ms:g} is above fail_ms ({self.fail_ms:g}); a warning comes before a failure"
            yield "warn_ms", f"{problem}: write {self.fail_ms:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCheck:
    """The test that nodes reach each other over the network that training will use."""

    level: str = _declare_level("fail")
    timeout_s: float = declare_key(2, kinds.finite_number(0.1), "Seconds that the test of a connection may take.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DnsCheck:
    """How long a reverse lookup of the node's own address may take. Libraries make many, and block on each."""

    level: str = _declare_level("warn")
    # A dead resolver takes 5 to 30 s for each lookup, one that works milliseconds.
    max_ms: float = declare_key(1000, kinds.finite_number(0), "Milliseconds that the lookup may take.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCheck:
    """Whether all nodes see a file that one of them has written to the run directory."""

    level: str = _declare_level("fail")
    timeout_s: float = declare_key(10, kinds.finite_number(0.1), "Seconds within which every node must see the file.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCheck:
    """Free space in the run directory."""

    level: str = _declare_level("fail")
    min_gb: float = declare_key(1, kinds.finite_number(0), "GB that must be free.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemporaryCheck:
    """Free space in TMPDIR, or else /tmp, of each node."""

    level: str = _declare_level("warn")
    min_gb: float = declare_key(1, kinds.finite_number(0), "GB that should be free.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmCheck:
    """Free space in /dev/shm, through which data loaders and NCCL exchange data."""

    level: str = _declare_level("warn")
    min_gb: float = declare_key(1, kinds.finite_number(0), "GB that should be free.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsCheck:
    """The kernel's limits for a process."""

    level: str = _declare_level("warn")
    # Data loaders and NCCL hold a descriptor for each worker and each peer; 1024, a common default, is soon used up.
    min_nofile: int = declare_key(4096, kinds.whole_number(0), "Open files per process (`ulimit -n`).")
    min_memlock_gb: float | None = declare_key(
        None,
        Nullable(kinds.finite_number(0)),
        "GB of locked memory (`ulimit -l`); null: unlimited on networks with RDMA, any limit elsewhere.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCheck:
    """GPUs: as many as were requested, without uncorrected memory errors, unused, and able to multiply."""

    level: str = _declare_level("fail")
    # A CUDA context alone takes some hundred MB; more than this belongs to another process.
    max_used_mb: int = declare_key(
        2048, kinds.whole_number(0), "MB of a GPU's memory that may be in use before training starts."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerCheck:
    """How long a small computation takes, on each GPU or on a CPU core, compared with the median of all nodes."""

    level: str = _declare_level("warn")
    max_ratio: float = declare_key(2, kinds.finite_number(1), "The limit, as a multiple of the median time.")


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthCheck:
    """An all-reduce over the elected network, measured like nccl-tests do. It takes some seconds."""

    level: str = declare_key(
        "off",
        kinds.level(*LEVELS),
        "`fail`: the attempt ends if a node is below the limit; `warn`: only a warning; `off`: the check does not run.",
    )
    size_mb: float = declare_key(64, kinds.finite_number(0.001), "MB that each rank reduces.")
    min_gb_per_s: float | None = declare_key(
        None, Nullable(kinds.finite_number(0)), "GB/s of bus bandwidth that must be reached; null: no limit."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightSpec:
    """Checks of the nodes before training starts. Each takes just a level (`dns: off`) or a mapping."""

    exclude: bool = declare_key(
        True, kinds.boolean(), "Whether to continue without nodes that failed a check; Slurm then allocates others."
    )
    timeout_s: float = declare_key(30, kinds.finite_number(1), "Seconds that a single check may take.")
    clock: ClockCheck = declare_key(ClockCheck(), LevelSection(ClockCheck), "Clock offsets between the nodes.")
    network: NetworkCheck = declare_key(NetworkCheck(), LevelSection(NetworkCheck), "Connections between the nodes.")
    port: SimpleCheck = declare_key(SimpleCheck(), LevelSection(SimpleCheck), "The rendezvous port of the training.")
    shared: SharedCheck = declare_key(
        SharedCheck(), LevelSection(SharedCheck), "Whether all nodes share the run directory."
    )
    versions: SimpleCheck = declare_key(
        SimpleCheck(),
        LevelSection(SimpleCheck),
        "Whether Python, torch, CUDA, driver and NCCL are the same on all nodes.",
    )
    gpu: GpuCheck = declare_key(GpuCheck(), LevelSection(GpuCheck), "GPUs; skipped if none are requested.")
    hardware: SimpleCheck = declare_key(
        SimpleCheck(),
        LevelSection(SimpleCheck),
        "Whether all nodes have the same GPUs, unless `resources.mixed` allows others; without GPUs, the same CPUs.",
    )
    disk: DiskCheck = declare_key(DiskCheck(), LevelSection(DiskCheck), "Free space in the run directory.")
    tmp: TemporaryCheck = declare_key(TemporaryCheck(), LevelSection(TemporaryCheck), "Free space in TMPDIR.")
    shm: ShmCheck = declare_key(ShmCheck(), LevelSection(ShmCheck), "Free space in /dev/shm.")
    limits: LimitsCheck = declare_key(LimitsCheck(), LevelSection(LimitsCheck), "Limits of a process.")
    dns: DnsCheck = declare_key(DnsCheck(), LevelSection(DnsCheck), "Reverse lookups of addresses.")
    straggler: StragglerCheck = declare_key(
        StragglerCheck(), LevelSection(StragglerCheck), "Nodes that are slower than others."
    )
    environment: AdvisoryCheck = declare_key(
        AdvisoryCheck(),
        LevelSection(AdvisoryCheck),
        "Variables that are obsolete, or that override what slurmtrain sets.",
    )
    bandwidth: BandwidthCheck = declare_key(BandwidthCheck(), LevelSection(BandwidthCheck), "Speed of the network.")
    plugins: dict[str, str] = declare_key(
        {},
        Entries(kinds.level(*LEVELS), "mapping of checks to levels", check_check_name),
        "Levels of your own checks, by the names of their entry points; by default `fail`.",
    )
