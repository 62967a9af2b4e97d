"""What a drill sees of its runs: that they train, what a fault leaves behind, and how their last checkpoints differ.

These are compared tensor by tensor, or file by file in unknown formats.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import CheckpointError, PathError
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.run.events.agent_events import LeftoversKilled, RanksExited, WorkersStarted
from slurmtrain.model.run.events.base import Event
from slurmtrain.model.run.layout import RunDir, attempt_of
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.next_attempts import current_plan
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.plugins.drill.facts import (
    FAULTS,
    Aftermath,
    Baseline,
    CheckpointComparison,
    InjectedFault,
    Sighting,
    TensorDifference,
)
from slurmtrain.plugins.drill.faults import FaultTarget, OwnCheckpoints, SaveWatch
from slurmtrain.runtime.checkpoint import external
from slurmtrain.runtime.checkpoint.checkpoint_files import newest_published, read_manifest
from slurmtrain.runtime.checkpoint.external import OTHER, Search, format_of, read_contents
from slurmtrain.runtime.checkpoint.untrusted_files import Contents, list_tree
from slurmtrain.system.owned_files import open_readable, read_readable
from slurmtrain.system.process import Process, descendants

if TYPE_CHECKING:
    from torch import Tensor

    from slurmtrain.runtime.checkpoint.torch_index import Index

_CHUNK = 1 << 20
# What torch reports in a rank if one of its DataLoader workers died.
_DEAD_WORKER = re.compile(rb"DataLoader worker \(pid.*\) (?:is killed by|exited unexpectedly).*")
# How much of a command line names a process.
_COMMAND = 60


class RunObserver:
    """Looks at one run of a drill repeatedly."""

    def __init__(self, workspace: Workspace, run_id: str, plan: Plan) -> None:
        """Look at the run ``run_id`` of ``workspace``. ``plan`` says where its script saves, if it does so itself."""
        self.run_id = run_id
        self._workspace = workspace
        has_own = plan.spec.checkpoint.glob is not None
        self._search = Search.from_plan(plan, self._directory) if has_own else None
        self.own = OwnCheckpoints(self._search)
        """The checkpoints that its script has saved."""
        self.injected: InjectedFault | None = None
        """The fault; None before it."""
        self._processes: list[tuple[Process, str]] = []
        self._survivors: list[str] | None = None

    def run(self) -> Run:
        """The state of the run, as last read from its journals."""
        run = self._workspace.store.load(self.run_id)
        assert run is not None
        return run

    def look(self) -> None:
        """Take note of the script's checkpoints, and of processes that should have ended."""
        self.own.look()
        if self.injected is not None and self._survivors is None and self._next_workers() is not None:
            self._survivors = self._alive()

    # --- before the fault -------------------------------------------------------------------------------------------

    def sighting(self, run: Run) -> Sighting:
        """How far the newest attempt of ``run`` has come."""
        attempt = run.newest
        if attempt is None:
            return Sighting()
        since = attempt.started_at or 0.0
        saves = [save for save in self.own.saves if save.saved_at >= since]
        newest = run.checkpoint
        saved = "" if newest is None else f"a checkpoint of step {newest.step}"
        return Sighting(
            first_step=attempt.first_step,
            last_step=attempt.last_step,
            total_steps=run.total_steps,
            saved=saved or (f"its checkpoint {saves[-1].path.name}" if saves else ""),
            saves=saves,
            lines=self._lines(attempt.key),
        )

    def save_watch(self) -> SaveWatch:
        """Notices the next save that begins."""
        return SaveWatch(self._search, self._directory.checkpoints)

    def note_processes(self, target: FaultTarget) -> None:
        """Remember the processes of the ranks, on this machine, that are about to be struck."""
        processes = dict.fromkeys(process for rank in target.all_ranks() for process in (rank, *descendants(rank)))
        self._processes = []
        for process in processes:
            words = ""
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ")
                words = command.decode(errors="replace").strip()
            self._processes.append((process, f"{words[:_COMMAND] or 'a process'} (pid {process.pid})"))

    # --- afterwards -------------------------------------------------------------------------------------------------

    def baseline(self, run: Run) -> Baseline:
        """What this ``run`` has shown, if it was not disturbed."""
        self.own.look()
        saves = self.own.saves
        seconds = (run.ended_at or 0.0) - (run.started_at or 0.0)
        lines = sum(self._lines(attempt.key) for attempt in run.attempts)
        source = ""
        if self._search is not None and saves:
            source = "by checkpoint.step" if self._search.step is not None else "which is in its name"
            with contextlib.suppress(CheckpointError, OSError):
                tree = list_tree(saves[-1].path)
                if self._search.step is None and format_of(tree, self._search.format).step(tree) is not None:
                    source = "which is inside it"
        return Baseline(run=run, saves=saves, lines=lines, seconds=max(0.0, seconds), step_source=source)

    def aftermath(self) -> Aftermath:
        """What the fault has left behind, once the run is over."""
        self.own.look()
        injected, workers = self.injected, self._next_workers()
        assert injected is not None
        store, until = self._workspace.store, workers.time if workers else math.inf
        killed = [event for event in store.events(self.run_id, LeftoversKilled) if injected.at <= event.time <= until]
        # What had to be killed before the next ranks started.
        leftovers = [event.payload for event in killed]
        codes: dict[str, int] = {}
        for event in store.events(self.run_id, RanksExited):
            if attempt_of(event.source) == injected.attempt:
                codes |= event.payload.codes
        alive = self._alive() if self._survivors is None else self._survivors
        dead_workers: list[str] = []
        for path in sorted(self._directory.attempts.glob(f"{injected.attempt}/logs/rank-*.log")):
            with contextlib.suppress(OSError):
                reports = _DEAD_WORKER.finditer(read_readable(path)) if FAULTS[injected.fault].announced else ()
                dead_workers += [match[0].decode(errors="replace") for match in reports]
        return Aftermath(
            exit_codes=codes,
            survivors=[*alive, *(name for each in leftovers for name in each.remaining)],
            leftovers=[name for each in leftovers for name in each.killed],
            dead_workers=dead_workers,
            saves=self.own.saves,
            resume_from=workers.payload.resume_from if workers else None,
            resumed_at=workers.time if workers else None,
        )

    def steps(self, key: str) -> list[tuple[float, int]]:
        """The steps finished by the attempt with this ``key``, each with its time in seconds since 1970."""
        steps = []
        with contextlib.suppress(OSError):
            for line in read_readable(self._directory.attempts / key / "metrics.jsonl").splitlines():
                # A killed rank leaves an incomplete line.
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    record = json.loads(line)
                    steps.append((float(record["t"]), int(record["step"])))
        return steps

    @property
    def _directory(self) -> RunDir:
        return self._workspace.root.run(self.run_id)

    def _lines(self, key: str) -> int:
        count = 0
        for path in self._directory.attempts.glob(f"{key}/logs/rank-*.log"):
            with contextlib.suppress(OSError), open_readable(path) as file:
                while chunk := file.read(_CHUNK):
                    count += chunk.count(b"\n")
        return count

    def _next_workers(self) -> Event[WorkersStarted] | None:
        """The first start of ranks after the fault."""
        assert self.injected is not None
        since = self.injected.at
        events = self._workspace.store.events(self.run_id, WorkersStarted)
        return min((event for event in events if event.time > since), key=lambda event: event.order, default=None)

    def _alive(self) -> list[str]:
        return [name for process, name in self._processes if process.alive()]


# --- how the last checkpoints of two runs differ ----------------------------------------------------------------------


# How many of the tensors that differ are named.
_NAMED = 10
# Under this prefix a checkpoint keeps what belongs to one rank, such as its random number states.
_OF_A_RANK = "ranks."


def compare_checkpoints(workspace: Workspace, first: Run, second: Run) -> CheckpointComparison:
    """How the last checkpoints of runs ``first`` and ``second`` of one ``workspace`` differ.

    Raises nothing: if they cannot be compared, the result says why.
    """
    try:
        spec = current_plan(workspace.root.run(first.id), first).spec.checkpoint
        if spec.glob is not None:
            own, other = (_newest_external(workspace, run) for run in (first, second))
            if own.step != other.step:
                steps = None if own.step is None or other.step is None else (own.step, other.step)
                why = f"they are {own.path.name} and {other.path.name}"
                return CheckpointComparison(identical=None, why=why, steps=steps)
            method = "files" if own.format == OTHER.NAME else "tensors"
            with _readable():
                contents = (read_contents(each.path, spec.format) for each in (own, other))
                return _compare_contents(*contents, method=method)
        paths = []
        for run in (first, second):
            path = newest_published(workspace.root.run(run.id).checkpoints)
            if path is None:
                raise CheckpointError(f"run {run.id} has left no checkpoint")
            paths.append(path)
        manifest, other_manifest = map(read_manifest, paths)
        # Weights of different steps differ anyway; what matters is that one run stopped early.
        if manifest.step != other_manifest.step:
            steps = manifest.step, other_manifest.step
            why = f"they are of steps {manifest.step} and {other_manifest.step}"
            return CheckpointComparison(identical=None, why=why, steps=steps)
        # What belongs to single ranks is compared only if there are as many.
        same_ranks = manifest.world_size == other_manifest.world_size
        # Equal hashes in the manifests save reading gigabytes. Different ones prove nothing: equal tensors may be
        # pickled differently.
        if same_ranks and manifest.files == other_manifest.files:
            return CheckpointComparison(identical=True, method="hashes")
        from slurmtrain.runtime.checkpoint.torch_index import Index

        with _readable():
            contents = (_contents_of(Index(path), same_ranks=same_ranks) for path in paths)
            return _compare_contents(*contents, method="values")
    except (CheckpointError, PathError, OSError) as error:
        return CheckpointComparison(identical=None, why=str(error))


def _newest_external(workspace: Workspace, run: Run) -> external.ExternalCheckpoint:
    """The newest checkpoint that the script itself has saved. Raises CheckpointError if there is none."""
    directory = workspace.root.run(run.id)
    plan = current_plan(directory, run)
    assert plan.spec.checkpoint.glob is not None
    checkpoint = external.newest(external.Search.from_plan(plan, directory))
    if checkpoint is None:
        raise CheckpointError(f"run {run.id} has left no checkpoint that checkpoint.glob matches")
    return checkpoint


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """Raise CheckpointError for everything that reading a checkpoint may raise."""
    # Imported here: torch takes a second.
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        [problem, *_] = [problem for problem, _ in error.failures.values()]
        raise CheckpointError(f"they cannot be read: {problem}") from error
    except CheckpointError:
        raise
    except Exception as error:  # torch.load may raise anything that unpickling does
        raise CheckpointError(f"they cannot be read: {' '.join(str(error).split())[:500]}") from error


# --- checkpoints of a session -----------------------------------------------------------------------------------------


def _contents_of(index: Index, *, same_ranks: bool) -> Contents:
    """What to compare of a checkpoint: tensors, schedulers, counters and, with the ``same_ranks``, states of ranks."""
    shapes = index.shapes()
    others = [name for name in index.metadata.state_dict_metadata if name not in shapes]
    if not same_ranks:
        others = [name for name in others if not name.startswith(_OF_A_RANK)]

    def value(name: str) -> Any:
        # A script that draws no random numbers does not seed them, and they differ every time.
        value = index.value(name)
        return {key: item for key, item in value.items() if key != "rng"} if name.startswith(_OF_A_RANK) else value

    return {
        **{name: partial(index.tensor, name) for name in shapes},
        **{name: partial(value, name) for name in sorted(others)},
    }


# --- contents, whatever the format ------------------------------------------------------------------------------------


def _compare_contents(first: Contents, second: Contents, *, method: str) -> CheckpointComparison:
    if unmatched := sorted(first.keys() ^ second.keys()):
        return CheckpointComparison(identical=False, method=method, where=unmatched[0])
    differences = _Differences()
    # One at a time: two whole checkpoints may not fit into memory.
    for name in first:
        differences.add(name, first[name](), second[name]())
    return differences.summarize(method)


class _Differences:
    """What differs in two checkpoints, as found so far."""

    def __init__(self) -> None:
        self._has_tensors = False
        # The relative difference of each tensor first.
        self._tensors: list[tuple[float, TensorDifference]] = []
        self._others: list[str] = []

    def add(self, name: str, first: Any, second: Any) -> None:
        """Compare the two values called ``name``."""
        import torch

        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and first.shape == second.shape:
            self._has_tensors = True
            difference = _tensor_difference(first, second)
            if difference is not None:
                self._tensors.append((difference[0], TensorDifference(name, difference[1])))
        else:
            self._others += _differing_paths(first, second, name)

    def summarize(self, method: str) -> CheckpointComparison:
        """All of it; tensors matter more than anything else."""
        others = tuple(self._others[:_NAMED])
        if not self._tensors and method == "tensors":
            if not self._has_tensors:
                why = "no tensor in them can be read safely: save state_dict()s, not whole objects"
                return CheckpointComparison(identical=None, method=method, why=why)
            # A trainer keeps much that training does not depend on.
            return CheckpointComparison(identical=True, method=method, others=others)
        if not self._tensors:
            return CheckpointComparison(
                identical=not others, method=method, where=others[0] if others else "", others=others
            )
        self._tensors.sort(key=lambda each: (-each[0], each[1].name))
        largest, first = self._tensors[0]
        return CheckpointComparison(
            identical=False,
            method=method,
            difference=largest,
            where=first.name,
            max_abs=max(difference.max_abs for _, difference in self._tensors),
            differing=tuple(difference for _, difference in self._tensors[:_NAMED]),
            count=len(self._tensors),
            others=others,
        )


def _tensor_difference(first: Tensor, second: Tensor) -> tuple[float, float] | None:
    """The largest absolute difference, over the largest absolute value and as it is; None if all bits are equal."""
    import torch

    # Bits rather than values: NaN is not equal to itself, and 0.0 equals -0.0.
    if first.dtype == second.dtype and torch.equal(_bits(first), _bits(second)):
        return None
    # Differences in small integer or half-precision types would overflow.
    wide = torch.complex128 if first.is_complex() or second.is_complex() else torch.float64
    a, b = first.to(wide), second.to(wide)
    largest, difference = float(torch.maximum(a.abs(), b.abs()).max()), float((a - b).abs().max())
    return (difference / largest if largest else 0.0), difference


def _bits(tensor: Tensor) -> Tensor:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _differing_paths(first: Any, second: Any, at: str) -> Iterator[str]:
    """The dotted paths, beginning with ``at``, at which two nested values differ."""
    import torch

    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        if first.shape != second.shape or _tensor_difference(first, second) is not None:
            yield at
    elif isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        for key, value in first.items():
            yield from _differing_paths(value, second[key], f"{at}.{key}")
    elif isinstance(first, list | tuple) and isinstance(second, list | tuple) and len(first) == len(second):
        for index, (a, b) in enumerate(zip(first, second, strict=True)):
            yield from _differing_paths(a, b, f"{at}.{index}")
    elif first != second and (first == first or second == second):  # NaN does not equal itself
        yield at
