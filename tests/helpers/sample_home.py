"""A person's home with a project and runs in every state, as commands find it; and stand-ins for what starts jobs.

Jobs do not run: a stand-in for the interpreter plays the launchers, and writes down each job that it starts. Slurm's
commands print what is in files, and scancel cancels all jobs.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.checkpoints import gone, make_checkpoints
from helpers.fakeslurm import PARTITIONS, squeue_line
from helpers.simulated_run import ELSEWHERE, SimulatedRun
from slurmtrain.model.experiment.checkpoint import KeepSpec
from slurmtrain.model.run.layout import RunsRoot, run_id
from slurmtrain.system.files import write_json

# The states of the sample's runs; a run's name is its state.
STATES = ("completed", "crashed", "gone", "elsewhere", "pending", "preempted", "cancelling", "created", "unfit", "own")
# Those whose jobs live.
LIVE = ("elsewhere", "pending")
SAVED = (10, 20, 30, 40)
SPEC = """\
name: digits
command: python train.py --lr ${params.lr}
params: {lr: 0.1, steps: 40}
resources: {nodes: 2, procs_per_node: 2, time: "00:30:00", mem: 4GB}
checkpoint: {every: {steps: 10}, keep: 2}
requeue: {max_failures: 2}
env: {TOKEN_FILE: /tmp/token}
setup: ["export A=1"]
tracking:
  mlflow: {enabled: false, uri: null, experiment: digits}
  csv: {enabled: false, dir: curves}
  tensorboard: {enabled: false, dir: null}
  wandb: {enabled: false, project: digits, entity: null, mode: offline, dir: null}
  plugins: {}
  live: false
sweep: {params.lr: [0.1, 0.2]}
"""
CONFIG = "runs: runs\nexecutor: local\nnode_expiry_hours: 24\n"
_FAILURE = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    raise ValueError("bad batch")
ValueError: bad batch
"""
# The launchers' parts. A job that lives is a shell that waits; one that does not has ended at once.
_PYTHON = """\
#!/bin/sh
slurm={slurm}
field() {{ printf '%s' "$1" | sed -n "s/.*\\"$2\\": \\"\\([^\\"]*\\)\\".*/\\1/p"; }}
[ "$1" = -X ] && shift 2
case "$2" in
slurmtrain.local)
    field "$3" submission >> "$slurm/started"
    if [ -e "$slurm/jobs-live" ]; then
        setsid sh "$slurm/job" submitit.local._local "$(field "$3" folder)" > /dev/null 2>&1 < /dev/null &
        pid=$!
        echo $pid >> "$slurm/pids"
        start=$(sed 's/.*) //' /proc/$pid/stat | cut -d ' ' -f 20)
    else
        pid=$$ start=1
    fi
    printf '{{"host": "%s", "boot": "%s", "pid": %s, "start": %s}}' \\
        "$(uname -n)" "$(cat /proc/sys/kernel/random/boot_id)" $pid $start ;;
slurmtrain.slurm.sbatch_process)
    field "$3" submission >> "$slurm/started"
    run=$(basename "$(dirname "$(dirname "$(field "$3" submission)")")")
    sed "s,{any_run},$run," "$slurm/queued" >> "$slurm/squeue.txt"
    echo '{{"job_id": "8"}}' ;;
*) exec {python} "$@" ;;
esac
"""
_ANY_RUN = "any-run-id"
_JOB = "trap 'exit 0' TERM\nsleep 600 &\nwait\n"


@dataclass(frozen=True, slots=True)
class SampleHome:
    """Where the parts of a sample are. It can be copied: nothing in it refers to its place, but :meth:`move_in`."""

    path: Path

    @property
    def project(self) -> Path:
        """Where commands are called."""
        return self.path / "project"

    @property
    def runs(self) -> Path:
        """The runs root."""
        return self.project / "runs"

    @property
    def slurm(self) -> Path:
        """The stand-ins, and what they answer."""
        return self.path / "slurm"

    @property
    def python(self) -> Path:
        """The stand-in for the interpreter."""
        return self.slurm / "python"

    def environ(self) -> dict[str, str]:
        """The environment of its commands."""
        return {
            "HOME": str(self.path / "home"),
            "PATH": f"{self.slurm}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}/usr/bin{os.pathsep}/bin",
            "TMPDIR": str(self.path / "tmp"),
            "USER": "tester",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def started(self) -> list[str]:
        """The ids of the runs of which jobs were started, in order."""
        log = self.slurm / "started"
        return [Path(line).parent.parent.name for line in log.read_text().splitlines()] if log.exists() else []

    def move_in(self) -> None:
        """Write what depends on the place: call this after a copy."""
        self.python.write_text(_PYTHON.format(slurm=self.slurm, python=sys.executable, any_run=_ANY_RUN))
        for name in ("squeue", "sacct", "scontrol", "sinfo", "sbatch", "srun", "sacctmgr", "scancel"):
            script = self.slurm / name
            last = f"sed -i 's/PENDING  /CANCELLED/' {self.slurm}/squeue.txt\n" if name == "scancel" else ""
            script.write_text(f"#!/bin/sh\ncat {self.slurm}/{name}.txt\n{last}")
            script.chmod(0o700)
        self.python.chmod(0o700)
        plan = self.runs / id_of("created") / "plan.json"
        if plan.exists():
            plan.write_text(plan.read_text().replace('"/w"', f'"{self.project}"'))


def id_of(state: str) -> str:
    """The id of the run in this state."""
    return run_id(1_700_000_000_000 + STATES.index(state), STATES.index(state))


def copy_home(source: SampleHome, target: Path) -> SampleHome:
    """A copy of a sample at a path that does not exist yet."""
    shutil.copytree(source.path, target, symlinks=True)
    home = SampleHome(target)
    home.move_in()
    return home


def make_home(path: Path, tracking: Mapping[str, Mapping[str, Any]] | None = None) -> SampleHome:
    """Make the sample.

    Args:
        path: where; it does not exist yet.
        tracking: what plans of runs say about trackers, by state.
    """
    home = SampleHome(path)
    for folder in (
        home.project,
        path / "home" / ".config" / "slurmtrain",
        path / "tmp",
        path / "elsewhere",
        home.slurm,
    ):
        folder.mkdir(parents=True, mode=0o700)
    home.runs.mkdir(mode=0o700)
    (home.project / "slurmtrain.yaml").write_text(CONFIG)
    (home.project / "spec.yaml").write_text(SPEC)
    (home.project / "train.py").write_text("print('trained')\n")
    (home.project / "notes.txt").write_text("not ours\n")
    (path / "home" / ".config" / "slurmtrain" / "slurmtrain.yaml").write_text("slurm_interval: 30\n")
    (path / "elsewhere" / "precious.txt").write_text("somebody's work\n")
    _write_answers(home.slurm)
    before = os.umask(0o077)
    try:
        for state in STATES:
            _RUNS[state](SampleRun(RunsRoot(home.runs), state, (tracking or {}).get(state)))
    finally:
        os.umask(before)
    home.move_in()
    return home


def _write_answers(slurm: Path) -> None:
    answers = dict.fromkeys(("squeue", "sacct", "scontrol", "sinfo", "sbatch", "srun", "sacctmgr", "scancel"), "")
    answers["squeue"] = squeue_line("71", run_id=id_of("pending")) + squeue_line("72", run_id=id_of("preempted"))
    answers["scontrol"] = PARTITIONS
    answers["sbatch"] = "Submitted batch job 8\n"
    for name, text in answers.items():
        (slurm / f"{name}.txt").write_text(text)
    (slurm / "job").write_text(_JOB)
    (slurm / "queued").write_text(squeue_line("8", run_id=_ANY_RUN))


class SampleRun:
    """A run that is being made."""

    def __init__(self, root: RunsRoot, state: str, tracking: Mapping[str, Any] | None = None) -> None:
        self.state = state
        self.tracking = tracking
        self.directory = root.run(id_of(state))

    def make(self, executor: str = "local", job: str = "1", **spec: Any) -> SimulatedRun:
        """The run, with the files that a submission writes."""
        keys: dict[str, Any] = {"name": self.state, "checkpoint": {"keep": 2}, **spec}
        if self.tracking is not None:
            keys["tracking"] = self.tracking
        sim = SimulatedRun(self.directory, spec=keys, executor=executor, job=job, now=time.time() - 7200)
        self.directory.spec.write_text(SPEC.replace("digits", self.state))
        # As a submission leaves it: no command has to make it, which a full disk may not allow.
        self.directory.lock.touch(mode=0o600)
        return sim.created(name=self.state, plan_hash="h", by="tester@here")

    def save(self) -> None:
        """Four checkpoints, all of attempt 1.0."""
        make_checkpoints(self.directory, SAVED, keep=KeepSpec(last=1000))

    def log(self, text: str = _FAILURE, restart: int = 0, job: str = "1") -> None:
        """What a rank has printed."""
        logs = self.directory.attempt(job, restart).logs
        logs.mkdir(parents=True, exist_ok=True)
        for rank in range(2):
            (logs / f"rank-{rank}.log").write_text(text)


def _train(run: SampleRun, process: Mapping[str, Any], **spec: Any) -> SimulatedRun:
    sim = run.make(**spec).submitted(process=process, host=process["host"])
    sim.started(nodes=2, host=process["host"], process=dict(process)).rank(
        "session", step=0, world_size=2, device="cpu"
    )
    sim.rank("total", total_steps=40)
    for step in range(1, 41):
        sim.reached(step, at=sim.now + step / 10, loss=1 / step, lr=0.1)
    run.log("step 1\nstep 2\n")
    return sim


def _completed(run: SampleRun) -> None:
    sim = _train(run, gone())
    run.save()
    sim.now = time.time()
    sim.ended("completed").ended("completed", 1)


def _crashed(run: SampleRun) -> None:
    sim = _train(run, gone(), requeue={"max_failures": 0})
    run.save()
    run.log()
    sim.now = time.time()
    sim.crashed().ended("crash", 1, reason="rank 0 of node 0 failed")
    sim.node("restart", round=1, members=[0, 1], cause="crash", why="rank 0 failed", failures=[], lost=[], reached=40)
    write_json(run.directory.request, {"request": "r", "by": "tester"})
    sim.crashed()


def _gone(run: SampleRun) -> None:
    _train(run, gone())
    run.save()


def _elsewhere(run: SampleRun) -> None:
    _train(run, ELSEWHERE)


def _pending(run: SampleRun) -> None:
    run.make("slurm", "71").submitted()


def _preempted(run: SampleRun) -> None:
    sim = run.make("slurm", "72").submitted().started(nodes=2)
    sim.node("preflight", node=0, status="pass", seconds=2.0, findings=_findings("pass"))
    run.log("step 1\n", job="72")
    sim.stopped().node("requeue", cause="preempted", why="its nodes were needed", exclude=["n1"], delay_s=0.0)


def _cancelling(run: SampleRun) -> None:
    _train(run, gone()).cancel()


def _created(run: SampleRun) -> None:
    run.make()


def _unfit(run: SampleRun) -> None:
    sim = run.make("slurm", "73").submitted().started(nodes=2)
    for node, status in enumerate(("pass", "fail")):
        sim.node("preflight", node, node=node, status=status, seconds=2.0, findings=_findings(status), blamed=node == 1)
    sim.ended("preflight", 0, reason="n1: disk: full").ended("preflight", 1, reason="n1: disk: full")


def _findings(status: str) -> list[dict[str, Any]]:
    return [{"check": "disk", "status": status, "summary": "3 GB free", "evidence": {"free_gb": 3}}]


def _own(run: SampleRun) -> None:
    sim = _train(run, gone(), requeue={"max_failures": 0}, checkpoint={"glob": "{checkpoint_dir}/epoch-*.pt"})
    for epoch in (1, 2):
        (run.directory.checkpoints / f"epoch-{epoch}.pt").write_bytes(b"weights" * 100)
    sim.ended("crash", reason="rank 0 exited with code 1")


_RUNS = {
    "completed": _completed,
    "crashed": _crashed,
    "gone": _gone,
    "elsewhere": _elsewhere,
    "pending": _pending,
    "preempted": _preempted,
    "cancelling": _cancelling,
    "created": _created,
    "unfit": _unfit,
    "own": _own,
}
