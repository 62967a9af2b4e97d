"""What a node measures of itself before training: the facts that :mod:`slurmtrain.model.preflight.checks` judges.

Each check measures in a daemon thread of its own, and none is waited for beyond its time: a file system that has died
hangs the thread that touches it, not the agent.
"""

from __future__ import annotations

import copy
import hashlib
import os
import platform
import resource
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from slurmtrain.model.preflight.obsolete_variables import describe_obsolete, describe_overruled
from slurmtrain.model.run.layout import AttemptDir
from slurmtrain.model.spec.plan import Plan
from slurmtrain.model.spec.preflight_checks import PreflightSpec
from slurmtrain.runtime.preflight.facts import gpus, matmul, plugins
from slurmtrain.system.files import describe_os_error, write_atomically
from slurmtrain.version import __version__

Facts = dict[str, Any]
Measurement = Callable[[], Facts | None]

# Checks that have a time of their own: a look-up that takes longer than it may has failed already.
_LIMITS: dict[str, Callable[[PreflightSpec], float]] = {
    "shared": lambda preflight: preflight.shared.timeout_s,
    "dns": lambda preflight: preflight.dns.max_ms / 1e3 + 1.0,
}
# Beyond the time that a measure keeps by itself, before its thread is taken to hang.
_GRACE_S = 0.5
# The part of the time of a check that the matrix product of GPUs may take: the rest is for what comes before it.
_PRODUCT = 0.9
_FIRST_POLL_S, _LAST_POLL_S = 0.005, 0.2
_TEMPORARY = "/tmp"  # noqa: S108 (nothing is written there)
_RDMA = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext:
    """The node that measures: number ``node`` of ``nodes``, in an attempt whose directory all of them should see.

    ``executor`` is local or slurm. ``addresses`` are this node's own, numeric. ``token`` is hex text that all nodes of
    the attempt share and no other attempt has. ``environ`` is what the ranks of this node are to have.
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


def measure_all(here: NodeContext) -> dict[str, Facts]:
    """Facts of every check that is not off, by its name, a moment after ``preflight.timeout_s`` at the latest.

    Facts are JSON's own types. Where there are none they say why: ``{"skip": reason}`` where the check does not apply,
    ``{"error": text}`` where it could not be made, ``{"timeout": seconds}`` where it did not end in time.
    """
    preflight = here.plan.spec.preflight
    race = _ParallelMeasurements()
    for check, measure in _measures(here).items():
        if getattr(preflight, check).level != "off":
            limit_s = min(_LIMITS[check](preflight), preflight.timeout_s) if check in _LIMITS else preflight.timeout_s
            race.start(check, measure, limit_s)
    race.start("plugins", partial(_start_plugins, here, race), preflight.timeout_s)
    return race.facts()


class _ParallelMeasurements:
    """Measures side by side, each in a thread that may be left behind.

    Not a pool of concurrent.futures: its threads are joined when the interpreter exits, and one that hangs never ends.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._changed = threading.Condition()
        self._limits: dict[str, float] = {}
        self._facts: dict[str, Facts | None] = {}

    def start(self, name: str, measure: Measurement, limit_s: float) -> None:
        """Begin a measure, which may take until ``limit_s`` seconds after the race began. None stands for no facts."""
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
        """Wait for the measures, and return their facts by name."""
        with self._changed:
            while late := self._limits.keys() - self._facts.keys():
                left = self._began + max(self._limits[name] for name in late) + _GRACE_S - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            known = {name: self._facts.get(name, {"timeout": limit_s}) for name, limit_s in self._limits.items()}
        return {name: facts for name, facts in known.items() if facts is not None}


class _CachedMeasurement:
    """A measure whose facts several checks use; it is made when the first of them asks."""

    def __init__(self, measure: Callable[[], Facts]) -> None:
        self._measure = measure
        self._lock = threading.Lock()
        self._facts: Facts | None = None

    def __call__(self) -> Facts:
        with self._lock:
            if self._facts is None:
                self._facts = self._measure()
            return self._facts


def _measures(here: NodeContext) -> dict[str, Measurement]:
    preflight, asked = here.plan.spec.preflight, here.plan.spec.resources.gpus_per_node
    nvml = gpus.load_nvml() if asked else None
    look = _CachedMeasurement(lambda: gpus.inspect_gpus(asked, here.environ, _PRODUCT * preflight.timeout_s, nvml))
    return {
        "shared": partial(_shared, here),
        "versions": lambda: _versions(nvml),
        "gpu": look if asked else lambda: {"skip": "no GPUs asked for"},
        "disk": lambda: _room(here.attempt.run.path),
        "tmp": lambda: _room(Path(here.environ.get("TMPDIR") or _TEMPORARY)),
        "shm": lambda: _room(Path("/dev/shm")),  # noqa: S108 (nothing is written there)
        "limits": _limits,
        "dns": lambda: _dns(here.addresses),
        "straggler": partial(_straggler, here, look if asked else None),
        "environment": lambda: {
            "said": [*describe_obsolete(here.environ), *describe_overruled(here.plan.spec.env, {})]
        },
    }


# --- the shared directory ---------------------------------------------------------------------------------------


def remove_shared_file(here: NodeContext) -> None:
    """Remove what node 0 wrote for the others to see. To be called once all nodes have measured."""
    with suppress(OSError):
        _file_of(here, "shared").unlink(missing_ok=True)


def _shared_limit(here: NodeContext) -> float:
    preflight = here.plan.spec.preflight
    return min(_LIMITS["shared"](preflight), preflight.timeout_s)


def _file_of(here: NodeContext, purpose: str) -> Path:
    return here.attempt.path / f".preflight-{_digest(here.token, purpose)[:16]}"


def _digest(token: str, purpose: str) -> str:
    """What only nodes of this attempt can know, and does not give the token away."""
    return hashlib.sha256(f"{purpose}:{token}".encode()).hexdigest()


def _shared(here: NodeContext) -> Facts:
    """``write_ms`` of node 0, ``read_ms`` until its file could be read; or ``refused``, or ``unseen``."""
    began = time.monotonic()
    content = _digest(here.token, "content").encode()
    own, shared = _file_of(here, f"node-{here.node}"), _file_of(here, "shared")
    facts: Facts = {}
    try:
        # As each node is to create, and make durable, a journal of its own there.
        write_atomically(own, content)
        own.unlink()
        if here.node == 0:
            since = time.monotonic()
            write_atomically(shared, content)
            facts["write_ms"] = _ms_since(since)
    except OSError as error:
        return {"refused": describe_os_error(error)}
    seen = _await(shared, content, began + _shared_limit(here))
    return {**facts, "read_ms": _ms_since(began)} if seen else {**facts, "unseen": True}


def _await(path: Path, content: bytes, deadline: float) -> bool:
    """Whether a file had this content before ``deadline``, by the monotonic clock."""
    pause = _FIRST_POLL_S
    while not _holds(path, content):
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LAST_POLL_S)
    return True


def _holds(path: Path, content: bytes) -> bool:
    try:
        # NFS remembers for up to a minute that a name is missing, until the directory is opened (nfs(5), lookupcache).
        os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        return path.read_bytes() == content
    except OSError:
        return False


def _ms_since(began: float) -> float:
    return round((time.monotonic() - began) * 1e3, 3)


# --- what this node has -----------------------------------------------------------------------------------------


def _versions(nvml: Any | None) -> Facts:
    """Versions as text, None for what is not there. Nothing here opens a GPU."""
    import torch

    try:
        nccl = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):  # torch is built without it
        nccl = None
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "driver": gpus.driver_version(nvml),
        "slurmtrain": __version__,
    }


def _room(path: Path) -> Facts:
    """``free`` bytes and ``inodes`` of this user in a directory; inodes are None where the file system counts none."""
    try:
        there = os.statvfs(path)
    except (FileNotFoundError, NotADirectoryError):
        return {"path": str(path), "missing": True}
    return {
        "path": str(path),
        "free": there.f_bavail * there.f_frsize,
        "inodes": there.f_favail if there.f_files else None,
        "writable": os.access(path, os.W_OK | os.X_OK),
    }


def _limits() -> Facts:
    """``nofile`` and ``memlock`` (bytes) as they hold now, None for no limit, and the names of RDMA devices."""

    def soft(which: int) -> int | None:
        value = resource.getrlimit(which)[0]
        return None if value == resource.RLIM_INFINITY else value

    devices = sorted(os.listdir(_RDMA)) if _RDMA.is_dir() else []
    return {"nofile": soft(resource.RLIMIT_NOFILE), "memlock": soft(resource.RLIMIT_MEMLOCK), "rdma": devices}


def _dns(addresses: Sequence[str]) -> Facts:
    """Milliseconds of a reverse look-up by address. That an address has no name is fine: then that took so long."""
    if not addresses:
        return {"skip": "this node uses no network"}
    took: Facts = {}

    def look_up(address: str) -> None:
        began = time.monotonic()
        with suppress(OSError):
            socket.getnameinfo((address, 0), socket.NI_NUMERICSERV)
        took[address] = _ms_since(began)

    threads = [threading.Thread(target=look_up, args=(address,), daemon=True) for address in addresses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return took


def _straggler(here: NodeContext, look: _CachedMeasurement | None) -> Facts:
    """``seconds`` of a matrix product: of the slowest GPU where there are GPUs, else of one CPU core."""
    if here.nodes == 1:
        return {"skip": "there is one node only"}
    if here.executor == "local":
        return {"skip": "the nodes of a local run are one machine"}
    if look is None:
        return {"seconds": matmul.multiply_on_one_core()}
    looked = look()
    times = [gpu["ms"] for gpu in looked.get("gemm", {}).get("gpus", ()) if "ms" in gpu]
    return {"seconds": max(times) / 1e3} if times else {"skip": "no GPU has multiplied"}


# --- plug-ins ---------------------------------------------------------------------------------------------------


def _start_plugins(here: NodeContext, race: _ParallelMeasurements) -> Facts | None:
    """Let the plug-ins take part in the race, each as a check of its own."""
    spec = here.plan.spec
    limit_s = spec.preflight.timeout_s
    found, facts, clashes = plugins.find_plugins(
        spec.preflight.plugins, {field.name for field in fields(PreflightSpec)}
    )
    node = plugins.CheckedNode(
        index=here.node,
        nodes=here.nodes,
        host=here.host,
        executor=here.executor,
        run_dir=here.attempt.run.path,
        params=copy.deepcopy(spec.params),
        gpus_per_node=spec.resources.gpus_per_node,
    )
    for name, point in found.items():
        race.start(name, partial(plugins.run_plugin, point, node), limit_s)
    for name, said in facts.items():
        race.start(name, lambda said=said: said, limit_s)  # type: ignore[misc]
    return {"error": clashes} if clashes else None
