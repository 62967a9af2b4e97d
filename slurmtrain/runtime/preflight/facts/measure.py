"""What a node measures about itself before training: the facts that :mod:`slurmtrain.model.preflight.checks` judges.

Each check measures in its own daemon thread, and has a time limit: a filesystem whose server is down hangs the thread
that touches it, not the agent. Checks from other packages are entry points of the group ``slurmtrain.checks``:
callables that get a :class:`CheckedNode` and return ``(status, summary)`` or ``(status, summary, evidence)``.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
import json
import math
import os
import platform
import resource
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from slurmtrain.model.environment import describe_obsolete, describe_overruled
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.sections import PreflightSpec
from slurmtrain.model.preflight.checks import STATUSES
from slurmtrain.model.run.layout import AttemptDir
from slurmtrain.runtime.environment.process_limits import soft_limit_of_ranks
from slurmtrain.runtime.environment.variables import environment_of_tools
from slurmtrain.runtime.job.torch_private import torch_versions
from slurmtrain.runtime.preflight.facts import cpus, gpus
from slurmtrain.system.files import describe_os_error, space_left, write_atomically
from slurmtrain.system.interpreter import declared
from slurmtrain.version import __version__

Facts = dict[str, Any]
Measurement = Callable[[], Facts | None]

# Added to the time limit, which some measurements enforce themselves, before a thread counts as hung.
_GRACE_S = 0.5
# The share of a check's time limit that the matrix product of GPUs may take: the rest is for NVML, which comes first.
_PRODUCT_SHARE = 0.9
_FIRST_POLL_S, _LAST_POLL_S = 0.005, 0.2
_TEMPORARY = "/tmp"  # noqa: S108 (nothing is written there)
GROUP = "slurmtrain.checks"
# Characters: a summary is one cell of a table.
_SUMMARY_LIMIT = 500
_RDMA = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext:
    """What the measurements of a node depend on.

    Attributes:
        node: The node's number.
        nodes: How many nodes the attempt has.
        host: The node's name.
        executor: local or slurm.
        attempt: The attempt, whose directory all nodes should see.
        plan: The run's plan.
        addresses: This node's numeric addresses.
        token: Hex text that all nodes of the attempt share and no other attempt has.
        environ: The environment of this node's ranks.
    """

    node: int
    nodes: int
    host: str
    executor: str
    attempt: AttemptDir
    plan: Plan
    addresses: Sequence[str]
    token: str
    environ: Mapping[str, str]


def measure_all(context: NodeContext) -> dict[str, Facts]:
    """Facts of every check that is not off, by name, at most half a second after ``preflight.timeout_s``.

    Facts are plain JSON types. If there are none, they hold the reason: ``{"skip": reason}`` if the check does not
    apply, ``{"error": text}`` if it could not run, ``{"timeout": seconds}`` if it did not end in time.
    """
    preflight, gpus_per_node = context.plan.spec.preflight, context.plan.spec.resources.gpus_per_node
    nvml = gpus.load_nvml() if gpus_per_node else None
    inspect_gpus = None
    if gpus_per_node:
        product_s = _PRODUCT_SHARE * preflight.timeout_s
        inspect_gpus = _CachedMeasurement(lambda: gpus.inspect_gpus(gpus_per_node, context.environ, product_s, nvml))
    own: dict[str, Measurement] = {
        "shared": partial(_measure_shared, context),
        "versions": lambda: {
            "python": platform.python_version(),
            **torch_versions(),
            "driver": gpus.driver_version(nvml),
            "slurmtrain": __version__,
        },
        "gpu": inspect_gpus or (lambda: {"skip": "no GPUs requested"}),
        "hardware": partial(_read_hardware, context, inspect_gpus),
        "disk": lambda: _measure_space(context.attempt.run.path),
        "tmp": lambda: _measure_space(Path(context.environ.get("TMPDIR") or _TEMPORARY)),
        "shm": lambda: _measure_space(Path("/dev/shm")),  # noqa: S108 (nothing is written there)
        "limits": _read_limits,
        "dns": lambda: _measure_dns(context.addresses),
        "straggler": partial(_measure_speed, context, inspect_gpus),
        # Journals contain this key, as evidence of the check.
        "environment": lambda: {
            "said": [*describe_obsolete(context.environ), *describe_overruled(context.plan.spec.env, {})]
        },
    }
    # Checks with a time limit of their own: a lookup that exceeds it has already failed.
    limits = {"shared": preflight.shared.timeout_s, "dns": preflight.dns.max_ms / 1e3 + 1.0}
    measurements = _ParallelMeasurements()
    for check, take in own.items():
        if getattr(preflight, check).level != "off":
            measurements.start(check, take, min(limits.get(check, preflight.timeout_s), preflight.timeout_s))
    # Finding plug-ins reads the metadata of all packages, perhaps from a slow filesystem: a measurement like any other.
    measurements.start("plugins", partial(_start_plugins, context, measurements), preflight.timeout_s)
    return measurements.facts()


class _ParallelMeasurements:
    """Concurrent measurements, each in a daemon thread that is abandoned if it hangs.

    A pool of concurrent.futures will not do: its threads are joined when the interpreter exits, and one that hangs
    never ends.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._changed = threading.Condition()
        self._limits: dict[str, float] = {}
        self._facts: dict[str, Facts | None] = {}

    def start(self, name: str, measure: Measurement, limit_s: float) -> None:
        """Start a measurement; its facts are kept unless they are None.

        Args:
            name: The name of its facts.
            measure: Returns them.
            limit_s: Seconds that it may take, counted from when this object was made.
        """
        with self._changed:
            self._limits[name] = limit_s
        threading.Thread(target=self._run, args=(name, measure), name=f"preflight-{name}", daemon=True).start()

    def _run(self, name: str, measure: Measurement) -> None:
        try:
            facts = measure()
        except BaseException as error:  # noqa: BLE001 (whatever a plug-in raises, SystemExit too)
            facts = {"error": f"{type(error).__name__}: {error}"}
        with self._changed:
            self._facts[name] = facts
            self._changed.notify_all()

    def facts(self) -> dict[str, Facts]:
        """Wait for the measurements, and return their facts by name."""
        with self._changed:
            # A measurement may start others while it runs, as the one of the plug-ins does.
            while running := self._limits.keys() - self._facts.keys():
                deadline = self._began + max(self._limits[name] for name in running) + _GRACE_S
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    break
                self._changed.wait(remaining_s)
            facts = {name: self._facts.get(name, {"timeout": limit_s}) for name, limit_s in self._limits.items()}
        return {name: of_check for name, of_check in facts.items() if of_check is not None}


class _CachedMeasurement:
    """A measurement whose facts several checks use; it runs when the first of them asks."""

    def __init__(self, measure: Callable[[], Facts]) -> None:
        self._measure = measure
        self._lock = threading.Lock()
        self._facts: Facts | None = None

    def __call__(self) -> Facts:
        with self._lock:
            if self._facts is None:
                self._facts = self._measure()
            return self._facts


# --- the run directory, which all nodes share -------------------------------------------------------------------------
def remove_shared_file(context: NodeContext) -> None:
    """Remove the file that node 0 wrote for the others to see; call this once all nodes have measured."""
    with suppress(OSError):
        _test_file(context, "shared").unlink(missing_ok=True)


def _test_file(context: NodeContext, purpose: str) -> Path:
    return context.attempt.path / f".preflight-{_token_digest(context.token, purpose)[:16]}"


def _token_digest(token: str, purpose: str) -> str:
    """Text that only nodes of this attempt can know, and from which the token cannot be derived."""
    return hashlib.sha256(f"{purpose}:{token}".encode()).hexdigest()


def _measure_shared(context: NodeContext) -> Facts:
    """``write_ms`` of node 0, and ``read_ms`` until its file could be read, or ``unseen``; or ``refused``."""
    began = time.monotonic()
    content = _token_digest(context.token, "content").encode()
    own, shared = _test_file(context, f"node-{context.node}"), _test_file(context, "shared")
    facts: Facts = {}
    try:
        # Each node will create its own journal there, and make it durable.
        write_atomically(own, content)
        own.unlink()
        if context.node == 0:
            since = time.monotonic()
            write_atomically(shared, content)
            facts["write_ms"] = _ms_since(since)
    except OSError as error:
        return {"refused": describe_os_error(error)}
    preflight, pause = context.plan.spec.preflight, _FIRST_POLL_S
    deadline = began + min(preflight.shared.timeout_s, preflight.timeout_s)
    while True:
        with suppress(OSError):
            # An NFS client caches for up to a minute that a name is missing, until the directory is opened (nfs(5),
            # lookupcache).
            os.close(os.open(shared.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            if shared.read_bytes() == content:
                return {**facts, "read_ms": _ms_since(began)}
        if time.monotonic() >= deadline:
            return {**facts, "unseen": True}
        time.sleep(pause)
        pause = min(2 * pause, _LAST_POLL_S)


def _ms_since(began: float) -> float:
    return round((time.monotonic() - began) * 1e3, 3)


# --- facts of this node -----------------------------------------------------------------------------------------------
def _measure_space(path: Path) -> Facts:
    """``free`` bytes and ``inodes`` for this user in a directory; inodes are None if the filesystem has no limit."""
    try:
        space = space_left(path)
    except (FileNotFoundError, NotADirectoryError):
        return {"path": str(path), "missing": True}
    return {
        "path": str(path),
        "free": space.bytes,
        "inodes": space.inodes,
        "writable": os.access(path, os.W_OK | os.X_OK),
    }


def _read_limits() -> Facts:
    """The soft limits ``nofile`` and ``memlock`` (bytes), None for no limit, and the names of RDMA devices."""
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limits = {"nofile": soft_limit_of_ranks(), "memlock": memlock}
    facts: Facts = {name: None if limit == resource.RLIM_INFINITY else limit for name, limit in limits.items()}
    return {**facts, "rdma": sorted(os.listdir(_RDMA)) if _RDMA.is_dir() else []}


def _measure_dns(addresses: Sequence[str]) -> Facts:
    """Milliseconds of a reverse lookup, by address. An address without a name is fine: that answer counts, too."""
    if not addresses:
        return {"skip": "this node does not use a network"}
    durations_ms: Facts = {}

    def look_up(address: str) -> None:
        began = time.monotonic()
        with suppress(OSError):
            socket.getnameinfo((address, 0), socket.NI_NUMERICSERV)
        durations_ms[address] = _ms_since(began)

    threads = [threading.Thread(target=look_up, args=(address,), daemon=True) for address in addresses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return durations_ms


def _read_hardware(context: NodeContext, inspect_gpus: _CachedMeasurement | None) -> Facts:
    """The ``gpus`` of this node, or its ``cpu`` and ``cpus``."""
    if inspect_gpus is None:
        resources = context.plan.spec.resources
        requested = resources.local_world_size * resources.cpus_per_proc
        return {"skip": "there is one node only"} if context.nodes == 1 else cpus.describe_cpus(requested)
    inspected = inspect_gpus()
    listed = inspected.get("gpus") or inspected.get("gemm", {}).get("gpus", ())
    visible = [{"name": gpu.get("name"), "memory": gpu.get("memory")} for gpu in listed]
    return {"gpus": visible} if visible else {"skip": inspected.get("skip", "no GPU was found")}


def _measure_speed(context: NodeContext, inspect_gpus: _CachedMeasurement | None) -> Facts:
    """``seconds`` of a matrix product on the slowest GPU, or of a computation on one CPU core if there are no GPUs."""
    if context.nodes == 1:
        return {"skip": "there is one node only"}
    if context.executor == "local":
        return {"skip": "the nodes of a local run are one machine"}
    if inspect_gpus is None:
        return {"seconds": cpus.compute_on_one_core()}
    times = [gpu["ms"] for gpu in inspect_gpus().get("gemm", {}).get("gpus", ()) if "ms" in gpu]
    return {"seconds": max(times) / 1e3} if times else {"skip": "no GPU finished a matrix product"}


# --- plug-ins ---------------------------------------------------------------------------------------------------------
def _start_plugins(context: NodeContext, measurements: _ParallelMeasurements) -> Facts | None:
    """Start the measurement of each plug-in, as a separate check; returns the error of names that clash."""
    spec = context.plan.spec
    limit_s = spec.preflight.timeout_s
    points, facts, clashes = find_plugins(spec.preflight.plugins, {field.name for field in fields(PreflightSpec)})
    node = CheckedNode(
        index=context.node,
        nodes=context.nodes,
        host=context.host,
        executor=context.executor,
        run_dir=context.attempt.run.path,
        params=copy.deepcopy(spec.params),
        gpus_per_node=spec.resources.gpus_per_node,
    )
    for name, point in points.items():
        measurements.start(name, partial(run_plugin, point, node), limit_s)
    for name, error in facts.items():
        measurements.start(name, partial(dict, error), limit_s)
    return {"error": clashes} if clashes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedNode:
    """What a plug-in receives.

    Attributes:
        index: The node's number, from 0.
        nodes: How many nodes the attempt has.
        host: The node's name.
        executor: local or slurm.
        run_dir: The run's directory.
        params: A copy of the spec's parameters.
        gpus_per_node: How many GPUs of a node the job has.
    """

    index: int
    nodes: int
    host: str
    executor: str
    run_dir: Path
    params: Mapping[str, Any]
    gpus_per_node: int


def find_plugins(
    levels: Mapping[str, str], reserved: Collection[str]
) -> tuple[dict[str, EntryPoint], dict[str, dict[str, Any]], str]:
    """Find the plug-ins of this node that are not off; nothing is loaded yet.

    Args:
        levels: The spec's levels, by name.
        reserved: Names that no plug-in may have: the names of slurmtrain's own checks.

    Returns:
        Entry points by name; facts with the error of unusable ones; and a description of names that clash.
    """
    offered: dict[str, list[EntryPoint]] = {}
    for point in declared(GROUP):
        if levels.get(point.name) != "off":
            offered.setdefault(point.name, []).append(point)
    facts: dict[str, dict[str, Any]] = {
        name: {"error": f"no such entry point of the group {GROUP!r}"}
        for name, level in levels.items()
        if level != "off" and name not in offered
    }
    clashes = []
    for name, points in offered.items():
        packages = ", ".join(sorted({point.dist.name if point.dist is not None else point.value for point in points}))
        # Reported under the name "plugins": the check of this name is slurmtrain's own, and runs as usual.
        if name in reserved:
            clashes.append(f"the entry point {name!r} of {packages} has the name of a built-in check; rename it")
        elif len(points) > 1:
            facts[name] = {"error": f"several packages have a check of this name: {packages}"}
    usable = {name: points[0] for name, points in offered.items() if name not in reserved and len(points) == 1}
    return usable, facts, "; ".join(clashes)


def run_plugin(point: EntryPoint, node: CheckedNode) -> dict[str, Any]:
    """Load a plug-in and run its check on a node; returns ``status``, ``summary`` and ``evidence``.

    Raises TypeError or ValueError if it returns something else, and whatever it raises itself.
    """
    check: Callable[[CheckedNode], object] = point.load()
    returned = check(node)
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise TypeError(f"{point.value} returned {returned!r:.100}, not (status, summary[, evidence])")
    status, summary, evidence = (*returned, {}) if len(returned) == 2 else returned
    if status not in STATUSES:
        raise ValueError(f"{point.value} returned the status {status!r:.100}; use one of {', '.join(STATUSES)}")
    if not isinstance(summary, str) or not isinstance(evidence, Mapping):
        raise TypeError(f"{point.value} returned a summary that is not text, or evidence that is not a mapping")
    # Converted to JSON and back, as in the journal: what JSON cannot hold raises here, where the plug-in is known.
    plain = json.loads(json.dumps(dict(evidence), allow_nan=False))
    return {"status": status, "summary": " ".join(summary.split())[:_SUMMARY_LIMIT], "evidence": plain}


# --- the clock --------------------------------------------------------------------------------------------------------

# ``disciplined`` (None: unknown), ``source`` (adjtimex, chrony, none), ``description`` (a phrase with
# figures) and ``bound_ms`` (the largest error of the clock against true time, or None).
Discipline = dict[str, Any]

# adjtimex(2): its result for a clock that is not synchronised.
_TIME_ERROR = 5
# NTP_PHASE_LIMIT of the kernel: its bound of the error grows by 500 ppm up to this when nothing keeps the clock.
_UNKNOWN_US = 16_000_000
# The reference of chronyd's directive "local".
_OWN_CLOCK = "7F7F0101"
_SYSTEM_PATHS = ("/usr/bin", "/usr/sbin", "/bin", "/sbin")
_CHRONY_FIELDS = 14


def read_discipline(timeout_s: float = 2.0) -> Discipline:
    """What synchronises this node's clock, by the kernel or, if that does not call it synchronised, by chrony.

    systemd-timesyncd and ntpd tell the kernel themselves. chronyd without ``rtcsync`` does not: it sets the bound of
    the clock's error, and leaves the flag alone. So a flag and a bound that contradict each other mean a clock that a
    program keeps. chrony has ``timeout_s`` seconds. Raises nothing.
    """
    kernel = ask_kernel()
    if kernel is not None and kernel["disciplined"]:
        return kernel
    # -n: names of servers are not looked up, which may take seconds.
    by_chrony = read_chrony(_output(("chronyc", "-n", "-c", "tracking"), timeout_s))
    if by_chrony is not None:
        return by_chrony
    if kernel is None:
        return _discipline(None, "none", "no time service answers")
    return {**kernel, "disciplined": True} if kernel["disciplined"] is None else kernel


def _discipline(disciplined: bool | None, source: str, description: str, bound_ms: float | None = None) -> Discipline:
    return {"disciplined": disciplined, "source": source, "description": description, "bound_ms": bound_ms}


# --- the kernel -------------------------------------------------------------------------------------------------


class Timex(ctypes.Structure):
    """``struct timex`` of adjtimex(2) on 64-bit Linux, 208 bytes."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        *((name, ctypes.c_long) for name in ("offset", "freq", "maxerror", "esterror")),
        ("status", ctypes.c_int),
        *((name, ctypes.c_long) for name in ("constant", "precision", "tolerance", "seconds", "fraction")),
        *((name, ctypes.c_long) for name in ("tick", "ppsfreq", "jitter")),
        ("shift", ctypes.c_int),
        *((name, ctypes.c_long) for name in ("stabil", "jitcnt", "calcnt", "errcnt", "stbcnt")),
        ("tai", ctypes.c_int),
        ("reserved", ctypes.c_int * 11),
    )


def ask_kernel() -> Discipline | None:
    """The kernel's answer; None if asking is not allowed, as in some containers, or this is not 64-bit Linux."""
    try:
        adjtimex = ctypes.CDLL(None).adjtimex
    except (OSError, AttributeError):
        return None
    if ctypes.sizeof(ctypes.c_long) != 8:
        return None
    # No mode: the call sets nothing.
    timex = Timex(modes=0)
    state = int(adjtimex(ctypes.byref(timex)))
    return read_kernel(state, timex.maxerror)


def read_kernel(state: int, maxerror_us: int) -> Discipline | None:
    """Interpret what adjtimex(2) returned, -1 being an error, and its bound of the clock's error in microseconds.

    ``disciplined`` is None if flag and bound contradict each other.
    """
    if state < 0:
        return None
    if maxerror_us >= _UNKNOWN_US:
        return _discipline(False, "adjtimex", "not synchronised, by the kernel")
    bound_ms = maxerror_us / 1e3
    error = f"{_at_most(bound_ms)} by the kernel"
    if state == _TIME_ERROR:
        return _discipline(None, "adjtimex", f"{error}, which does not report it as synchronised", bound_ms)
    return _discipline(True, "adjtimex", error, bound_ms)


# --- chrony -----------------------------------------------------------------------------------------------------


def read_chrony(text: str) -> Discipline | None:
    """The answer of ``chronyc -c tracking``, fourteen fields with commas between them, in seconds (chronyc(1)).

    The error is at most the sum of the remaining correction, the root dispersion and half of the root delay.
    """
    fields = next((line.split(",") for line in text.splitlines() if line.count(",") == _CHRONY_FIELDS - 1), None)
    if fields is None:
        return None
    if fields[13] == "Not synchronised":
        return _discipline(False, "chrony", "chrony follows no source")
    if fields[0] == _OWN_CLOCK:
        return _discipline(False, "chrony", "chrony follows only this clock itself")
    try:
        correction, delay, dispersion = (float(fields[index]) for index in (4, 10, 11))
    except ValueError:
        return None
    bound_ms = (abs(correction) + dispersion + delay / 2) * 1e3
    if not math.isfinite(bound_ms):
        return None
    return _discipline(True, "chrony", f"{_at_most(bound_ms)}, chrony follows {fields[1] or fields[0]}", bound_ms)


def _at_most(milliseconds: float) -> str:
    return (
        f"error at most {milliseconds:.3g} ms" if milliseconds < 999.5 else f"error at most {milliseconds / 1e3:.1f} s"
    )


def _output(command: Sequence[str], timeout_s: float) -> str:
    """What a command prints; empty if it is not installed, fails or takes too long."""
    environ = environment_of_tools()
    # Time services live in sbin directories, which are rarely on the PATH of a job.
    program = shutil.which(command[0], path=os.pathsep.join([environ["PATH"], *_SYSTEM_PATHS]))
    if program is None:
        return ""
    try:
        completed = subprocess.run(
            [program, *command[1:]],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return completed.stdout if completed.returncode == 0 else ""
