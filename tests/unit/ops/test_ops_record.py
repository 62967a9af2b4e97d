"""The record of runs, whatever happens to them in any order: every curve is that of an undisturbed run.

After each step, the histories and the registry's summaries hold what the account of this test says, and a registry that
is rebuilt elsewhere is the same. After each sync that was not killed, MLflow has what is final of the surviving line
under the metrics' names, what was trained again under ``replayed/`` and what is not final under ``live/``, each point
once; CSV files and those of TensorBoard have the surviving line, but for the newest step of a run that has not ended.

TEST_RECORDS and TEST_RECORD_STEPS say how many such stories there are, and how long each is; TEST_ENGINES=all adds
PostgreSQL.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from helpers import killpoints, shown_points
from helpers.disturbed_commands import memory_folder
from helpers.postgres_server import PostgresServer
from helpers.shown_points import Point, mlflow_form
from helpers.simulated_training import IdleJobs, Training
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from slurmtrain.config import Config
from slurmtrain.errors import NoCheckpoint, RunBusy
from slurmtrain.history import read_history
from slurmtrain.model.metrics.columns import MetricSummary
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.run import Run
from slurmtrain.ops.cancel import cancel
from slurmtrain.ops.prune import prune
from slurmtrain.ops.resume import resume
from slurmtrain.ops.shared.observe import observe, observe_run, rebuild
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit import submit_spec
from slurmtrain.ops.sync import sync
from slurmtrain.registry.ingest import ingest
from slurmtrain.registry.store import Store
from slurmtrain.specfile import load_spec

STEPS = int(os.environ.get("TEST_RECORD_STEPS", "20"))
EXAMPLES = int(os.environ.get("TEST_RECORDS", "3"))
SPEC = {
    "name": "record",
    "command": "true",
    "params": {"more": 0},
    "checkpoint": {"keep": 2},
    "requeue": {"max_failures": 1000, "max_node_failures": 1000, "restarts_in_place": 1000, "backoff_s": 0},
    "tracking": {
        "mlflow": {"experiment": "record"},
        "csv": {"enabled": True},
        "tensorboard": {"enabled": True},
        "live": True,
    },
}
ENGINES = ("sqlite", "postgresql") if os.environ.get("TEST_ENGINES") == "all" else ("sqlite",)

PICK = st.integers(0, 1)
DAMAGED = st.sampled_from([0, 0, 0, 1, 2])
"""How many of the newest checkpoints turn out to be damaged when a rank restores one."""

METRICS = ("loss", "count", "val")
INTERRUPTIONS = (
    "preempted", "preempted: saved", "crash", "completed", "completed: saved", "killed", "killed: torn",
    "killed: half saved", "killed: saved, unjournaled", "killed before it has restored", "restarted",
    "restarted: torn", "cancelled",
)  # fmt: skip
COMMANDS = (
    "submit", "resume", "resume from the start", "prune", "rebuild", "move", "go on elsewhere", "lose the registry",
    "grow old",
)  # fmt: skip


def loss(step: int) -> float:
    """What is logged of a step, however often it is trained."""
    return 1 / step


@dataclass
class Account:
    """What a run has logged, and what must remain of it."""

    line: dict[str, dict[int, Point]] = field(default_factory=lambda: defaultdict(dict))
    replayed: list[Point] = field(default_factory=list)
    is_fresh: bool = False
    """Whether training began at step 0, and has logged nothing since: that is known only with its first line."""

    def roll_back(self, step: int) -> None:
        """Training continues from this step."""
        for points in self.line.values():
            for each in sorted(each for each in points if each > step):
                self.replayed.append(points.pop(each))

    def log(self, step: int, time: float, metrics: dict[str, float]) -> None:
        if self.is_fresh:
            self.roll_back(0)
        self.is_fresh = False
        for name, value in metrics.items():
            self.line[name][step] = (name, step, time, value)

    def surviving(self, form: Callable[[Point], Any] = lambda point: point) -> set[Any]:
        """The points that remain, in a tracker's ``form``."""
        return {form(point) for points in self.line.values() for point in points.values()}

    @property
    def step(self) -> int:
        """The newest step that remains."""
        return max(self.line["loss"], default=0)

    def summaries(self) -> dict[str, MetricSummary]:
        summaries = {}
        for name, points in self.line.items():
            if points:
                values = [points[step][3] for step in sorted(points)]
                low, high, last = min(values), max(values), max(points)
                by_value = {value: step for step, value in sorted(((s, p[3]) for s, p in points.items()), reverse=True)}
                summaries[name] = MetricSummary(
                    len(points), last, points[last][3], low, by_value[low], high, by_value[high]
                )
        return summaries


@dataclass
class Trained:
    """A run, and what it has logged. ``training``: its attempt, while its processes live."""

    id: str
    account: Account = field(default_factory=Account)
    training: Training | None = None
    begun: set[str] = field(default_factory=set)
    """The attempts whose agents have started."""


class Record(RuleBasedStateMachine):
    """Runs of one runs root."""

    place: Path
    mlflow_uri: str
    registry: Callable[[Path], Any]
    host: Callable[[str], None]
    """Gives the machine on which commands are called another name."""
    numbers = itertools.count(1)

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[Trained] = []
        self.host("machine-0")
        self.config = self.configured(self.fresh("home"))
        # Its engine knows its statements already; what the commands of the rules use is opened by each.
        self.observer = self.workspace()
        self.again = Store(self.fresh("again").with_suffix(".db"))

    # --- training, and what interrupts it ----------------------------------------------------------------------------

    @initialize()
    def first(self) -> None:
        self.submit()

    @rule(pick=PICK, steps=st.integers(1, 4), saves=st.booleans(), evaluates=st.booleans(), damaged=DAMAGED)
    def train(self, pick: int, steps: int, saves: bool, evaluates: bool, damaged: int) -> None:
        """A run finishes some steps."""
        run = self.chosen(pick)
        self.go_on(run, damaged)
        if run.training is None:
            return
        self.finish(run, steps)
        if saves:
            run.training.save()
        if evaluates:
            self.log(run, {"val": 2 * loss(run.training.step)})

    @rule(pick=PICK, interruption=st.sampled_from(INTERRUPTIONS), steps=st.integers(0, 4), damaged=DAMAGED)
    def interrupt(self, pick: int, interruption: str, steps: int, damaged: int) -> None:
        """Something happens to a run in training, after some more steps."""
        run = self.chosen(pick)
        if interruption == "cancelled":
            cancel(self.workspace(), [run.id])
            self.leave(run)
            return
        if interruption == "killed before it has restored":
            if run.training is None and self.has_job(run):
                self.begin(run)
                self.leave(run)
            return
        self.go_on(run, damaged)
        if run.training is not None:
            self.finish(run, steps)
            if "saved" in interruption and run.training.step:
                run.training.save(journaled="unjournaled" not in interruption, whole="half" not in interruption)
            if "torn" in interruption:
                run.training.tear()
            cause = interruption.partition(":")[0]
            if cause == "restarted":
                run.training.restart()
                self.restore(run, damaged)
            elif cause == "killed":
                self.leave(run)
            else:
                run.training.end(cause, signal="SIGTERM" if cause == "preempted" else None)
                run.training = None

    # --- commands -----------------------------------------------------------------------------------------------------

    @rule(pick=PICK, task=st.sampled_from(COMMANDS))
    def command(self, pick: int, task: str) -> None:
        if task == "submit" and len(self.runs) < 2:
            self.submit()
        elif task.startswith("resume"):
            self.resume(self.chosen(pick), from_start="start" in task)
        elif task == "prune":
            assert prune(self.workspace(), self.chosen(pick).id).problems == []
        elif task == "rebuild":
            rebuild(self.workspace())
        elif task == "move":
            self.move()
        elif task == "go on elsewhere":
            self.go_on_elsewhere()
        elif task == "lose the registry" and isinstance(self.config.registry, Path):
            self.config.registry.unlink(missing_ok=True)
        elif task == "grow old":
            # Runs that have ended, and of which nothing has changed for a while, are read no more.
            for path in [self.config.runs, *self.config.runs.rglob("*")]:
                if path.is_dir():
                    os.utime(path, (1e9, 1e9 + next(self.numbers)))
        self.observer = self.workspace()

    def submit(self) -> None:
        spec = load_spec(SPEC, cwd=self.place, python="python")
        [run_id] = submit_spec(self.workspace(), spec, executor="local").run_ids
        self.runs.append(Trained(run_id))

    def resume(self, run: Trained, *, from_start: bool) -> None:
        if run.training is None and not self.has_job(run):
            # Without a checkpoint there is nothing to resume from; a run that has completed needs more to do.
            try:
                with suppress(NoCheckpoint):
                    resume(self.workspace(), run.id, [f"params.more={next(self.numbers)}"], from_start=from_start)
            except RunBusy:
                # The job of a killed command can only be seen once its process has become what it is to be.
                assert self.has_job(run)

    def move(self) -> None:
        """The runs root gets another name, as on another disk; a registry on a server has nothing of it there."""
        if not any(run.training or self.has_job(run) for run in self.runs):
            home = self.fresh("home")
            self.config.runs.rename(home)
            self.config = self.configured(home)

    def go_on_elsewhere(self) -> None:
        """Another machine takes over: it has a copy of the runs root, and nothing of its registry."""
        if not any(run.training or self.has_job(run) for run in self.runs):
            home = self.fresh("home")
            shutil.copytree(self.config.runs, home, symlinks=True, ignore=shutil.ignore_patterns("registry.db*"))
            shutil.rmtree(self.config.runs)
            self.config = self.configured(home)
            self.host(f"machine-{next(self.numbers)}")

    @rule()
    def sync(self) -> None:
        assert sync(self.workspace()).problems == []
        for run in self.runs:
            if (loaded := self.load(run)).attempts:
                self.check_mlflow(run, loaded)
                self.check_files(run, loaded)

    @rule(effect=st.integers(1, 80))
    def sync_killed(self, effect: int) -> None:
        child = os.fork()
        if child == 0:
            die_at(effect, self.config.runs)
            with suppress(BaseException):
                sync(self.workspace())
            os._exit(0)
        os.waitpid(child, 0)

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def curves_are_those_of_undisturbed_runs(self) -> None:
        observe(self.observer, ask_slurm=False)
        loaded = self.observer.store.load_all([run.id for run in self.runs])
        surviving = self.observer.store.surviving_metrics()
        for run in self.runs:
            account = run.account
            history = read_history(loaded[run.id], self.directory(run), keep_superseded=True)
            kept = {name: points_of(name, curve.kept) for name, curve in history.curves.items()}
            superseded = [p for name, curve in history.curves.items() for p in points_of(name, curve.superseded)]
            assert {name: line for name, line in kept.items() if line} == {
                name: [points[step] for step in sorted(points)] for name, points in account.line.items() if points
            }
            assert Counter(superseded) == Counter(account.replayed)
            assert [point[3] for point in kept.get("loss", ())] == [loss(s) for s in range(1, account.step + 1)]
            assert surviving.get(run.id, {}) == account.summaries()
        with self.again.begin() as transaction:
            transaction.clear()
            ingest(transaction, [self.directory(run) for run in self.runs], dead=False)
        assert self.again.load_all(list(loaded)) == loaded
        assert self.again.surviving_metrics() == surviving

    def check_mlflow(self, run: Trained, loaded: Run) -> None:
        """MLflow has what is final under the metrics' names, what was replayed under others, and nothing twice."""
        account = run.account
        shown = shown_points.in_mlflow(self.mlflow_uri, run.id, METRICS)
        assert shown is not None or not account.step
        under_name, replayed, live = shown or (set(), set(), set())
        line, before = account.surviving(mlflow_form), {mlflow_form(point) for point in account.replayed}
        assert len({(name, step) for name, step, _, _ in under_name}) == len(under_name)
        assert under_name <= line
        assert replayed <= before
        assert live <= line | before
        covered = max((each.step or 0 for each in loaded.checkpoints if each.on_disk and each.complete), default=0)
        final = line if loaded.ended else {point for point in line if point[1] < covered}
        assert final <= under_name
        assert line - under_name <= live
        if loaded.ended:
            assert replayed == before

    def check_files(self, run: Trained, loaded: Run) -> None:
        """CSV and TensorBoard have the surviving line; further metrics may still come for its newest step."""
        line: set[Point] = run.account.surviving()
        newest = {point for point in line if not loaded.ended and point[1] == run.account.step}
        for shown, form in (
            (shown_points.in_csv(self.config.runs / "csv" / f"{run.id}.csv", METRICS), shown_points.csv_form),
            (shown_points.in_tensorboard(self.config.runs / "tensorboard" / run.id), shown_points.tensorboard_form),
        ):
            assert len(set(shown)) == len(shown)
            assert {form(point) for point in line - newest} <= set(shown) <= {form(point) for point in line}

    # --- shared -------------------------------------------------------------------------------------------------------

    def workspace(self) -> Workspace:
        """What a new command has."""
        return Workspace(self.config, warn=pytest.fail)

    def chosen(self, pick: int) -> Trained:
        return self.runs[pick % len(self.runs)]

    def load(self, run: Trained) -> Run:
        return observe_run(self.observer, run.id, ask_slurm=False)

    def directory(self, run: Trained) -> RunDir:
        return self.observer.root.run(run.id)

    def has_job(self, run: Trained) -> bool:
        """Whether its newest attempt has a job whose agent has not started."""
        loaded = self.load(run)
        newest = loaded.newest
        return newest is not None and bool(newest.processes) and newest.key not in run.begun and not loaded.ended

    def go_on(self, run: Trained, damaged: int) -> None:
        """The run trains, after it has been resumed and its agent has started if need be."""
        if run.training is None and not self.has_job(run):
            self.resume(run, from_start=False)
        if run.training is None and self.has_job(run):
            self.begin(run)
            self.restore(run, damaged)

    def begin(self, run: Trained) -> None:
        """The agent of its newest attempt starts."""
        run.training = Training(self.directory(run), self.load(run))
        run.begun.add(run.training.place.path.name)

    def restore(self, run: Trained, damaged: int) -> None:
        step = run.training.restore(damaged)
        if step:
            run.account.roll_back(step)
        run.account.is_fresh = not step

    def finish(self, run: Trained, steps: int) -> None:
        for _ in range(steps):
            run.training.step += 1
            # The same loss each time, and a count that shows in which training it was logged.
            self.log(run, {"loss": loss(run.training.step), "count": float(next(self.numbers))})

    def log(self, run: Trained, metrics: dict[str, float]) -> None:
        run.training.log(metrics)
        line = json.loads(run.training.place.metrics.read_text().splitlines()[-1])
        run.account.log(line["step"], line["t"], metrics)

    def leave(self, run: Trained) -> None:
        """Its processes are gone."""
        if run.training is not None:
            run.training.kill()
            run.training = None

    def configured(self, home: Path) -> Config:
        return Config(runs=home, executor="local", registry=self.registry(home), mlflow_uri=self.mlflow_uri)

    def fresh(self, name: str) -> Path:
        """A path that nothing had before."""
        return self.place / f"{name}-{next(self.numbers)}"

    def teardown(self) -> None:
        try:
            self.sync()
        finally:
            for run in self.runs:
                self.leave(run)
            self.again.close()
            shutil.rmtree(self.config.runs, ignore_errors=True)


def points_of(name: str, points: Any) -> list[Point]:
    return [(name, step, time, value) for _, step, time, value in points.rows()]


def die_at(number: int, root: Path) -> None:
    """In a forked child: die right before its ``number``-th effect, commits to databases included."""
    effect = killpoints.kill_at(number)
    killpoints.watch(effect, str(root))
    sa.event.listen(sa.engine.Engine, "commit", lambda _: effect("commit"))


@pytest.fixture(params=ENGINES)
def record(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Record]]:
    jobs = IdleJobs()
    monkeypatch.setattr("slurmtrain.local.launch_here", jobs.launch)
    # What a command has claimed that was killed on another machine is void after a while, which no test waits.
    monkeypatch.setattr("slurmtrain.ops.shared.start._CLAIM_S", 0.0)
    host = [socket.gethostname()]
    monkeypatch.setattr(socket, "gethostname", lambda: host[0])
    # A child that is forked must not use connections of this process.
    monkeypatch.setenv("MLFLOW_SQLALCHEMYSTORE_POOLCLASS", "NullPool")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")

    def registry(home: Path) -> Any:
        if request.param == "sqlite":
            return home / "registry.db"
        server: PostgresServer = request.getfixturevalue("postgres")
        return server.registry(home)

    class RecordHere(Record):
        pass

    with memory_folder() as folder:
        RecordHere.place, RecordHere.registry = folder, staticmethod(registry)
        RecordHere.host = staticmethod(lambda name: host.__setitem__(0, name))
        RecordHere.mlflow_uri = f"sqlite:///{folder}/mlflow.db"
        yield RecordHere
        jobs.close()


@pytest.mark.slow
def test_every_curve_is_that_of_an_undisturbed_run_in_the_registry_and_in_mlflow(record: type[Record]) -> None:
    run_state_machine_as_test(
        record,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            # The same each time, unless somebody looks for more.
            derandomize="TEST_RECORDS" not in os.environ,
            suppress_health_check=list(HealthCheck),
        ),
    )
