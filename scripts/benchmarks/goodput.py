"""What interruptions cost on a real Slurm cluster: slurmtrain, submitit, and sbatch with torchrun.

The same small training on two nodes meets the same faults under each of them. It starts a cluster with scripts/cluster,
which requires root, or uses the one that SLURM_CONF names, which must come from scripts/cluster: other clusters cannot
be broken on purpose.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import _goodput_log as log
from _cluster import Cluster, NoCluster, cluster
from _goodput_log import Fault, Hand, Line, Start
from _measure import ROOT, Report, command, environment, run_quietly, say

BENCHMARKS = ROOT / "scripts" / "benchmarks"
NODES = 2
CLUSTER_NODES = 4
GRACE_S = 15
PARTITION = "spot"
MINUTES = 25
STEPS, QUICK_STEPS, UNDISTURBED_STEPS = 900, 500, 100
PAUSE_S = 0.09
EVERY = 50
SEED = 2026
PAUSES_S = (9.0, 14.0)
# How long another job occupies the nodes that it takes.
TAKEN_S = 20
# How long a node is powered off: long enough for Slurm to notice.
DARK_S = 40
GONE_S, STUCK_S = 30.0, 150.0
PATIENCE_S = 1200.0
POLL_S, ASK_S = 0.2, 2.0
SYSTEMS = ("slurmtrain", "submitit", "torchrun")
_BATCH = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --partition={partition}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --time={minutes}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={out}/job-%j.log
{more}
"""
# As an expert in both would write it: failed ranks are restarted in place, and a failed node ends the job.
_TORCHRUN = """\
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(getent ahostsv4 "$first" | awk 'NR == 1 {{ print $1 }}')
port=$((20000 + SLURM_JOB_ID % 10000))
export OMP_NUM_THREADS=1
srun --kill-on-bad-exit=1 {python} -m torch.distributed.run --nnodes={nodes} --nproc-per-node=1 --max-restarts=3 \\
  --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$address:$port" {script}"""


@dataclass
class TraceResult:
    """The outcome of one system under the trace; times are in seconds since 1970."""

    system: str
    began_t: float
    hands: list[str] = field(default_factory=list)
    faults: list[tuple[str, float]] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    ended_t: float = 0.0
    starts: list[Start] = field(default_factory=list)
    load: float = 0.0

    @property
    def ends(self) -> str:
        return log.counted(start.state for start in self.starts)

    @property
    def on_nodes_s(self) -> float:
        """Seconds during which it had all of its nodes."""
        return log.node_seconds(self.starts) / NODES

    def back_after(self, kind: str) -> list[float]:
        """For each fault of a kind, the seconds to the end of the next first step; none where none followed."""
        returns = [(t, log.first_after(self.lines, t)) for fault, t in self.faults if fault == kind]
        return [line.t - t for t, line in returns if line is not None]


@dataclass(frozen=True)
class Site:
    """A cluster that can be broken, and a folder that its nodes see."""

    cluster: Cluster
    folder: Path

    def run(self, argv: Sequence[str]) -> str:
        return run_quietly(argv, **self._environment())

    def try_to(self, argv: Sequence[str]) -> str:
        """The problem, or nothing."""
        completed = subprocess.run(
            argv, cwd=ROOT, env=environment(**self._environment()), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return (
            "" if completed.returncode == 0 else (completed.stderr.strip().splitlines() or ["it does not say why"])[-1]
        )

    def _environment(self) -> dict[str, str]:
        paths = [str(ROOT), str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            "SLURM_CONF": self.cluster.conf,
            "SLURMTRAIN_RUNS": str(self.folder / "runs"),
            "PYTHONPATH": os.pathsep.join(paths),
        }

    def script(self, *arguments: str) -> str:
        """Run scripts/cluster on this cluster; return the problem, or nothing."""
        return self.try_to([sys.executable, str(ROOT / "scripts" / "cluster"), *arguments, "--name", self.cluster.name])

    def wait_until_idle(self) -> None:
        """Wait until all nodes are available and idle, even of the job that preempted another one."""
        deadline = time.monotonic() + 2 * PATIENCE_S / 10
        while True:
            states = self.cluster.ask("sinfo", "--noheader", "--Node", f"--partition={PARTITION}", "--format=%T")
            if set(states.split()) == {"idle"}:
                return
            if time.monotonic() > deadline:
                sys.exit(f"bench: the nodes of the cluster '{self.cluster.name}' do not become idle: {states.split()}")
            time.sleep(1)

    def starts(self, since_t: float, prefix: str) -> list[Start]:
        """All starts of these jobs that accounting knows of; it may lag behind."""
        since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since_t - 5))
        options = ["-X", "-D", "-P", "-n", "-S", since, "--format=JobName,State,Start,End,NNodes"]
        deadline = time.monotonic() + 30
        while True:
            output = self.cluster.ask("env", "SLURM_TIME_FORMAT=%s", "sacct", *options)
            try:
                return log.starts(output, prefix)
            except ValueError as error:
                if time.monotonic() > deadline:
                    sys.exit(f"bench: {error}, says sacct")
            time.sleep(1)


class System:
    """How a training is submitted, and resubmitted by hand if it does not restart automatically."""

    def __init__(self, site: Site, name: str, steps: int, number: int) -> None:
        self.site, self.name, self.steps = site, name, steps
        self.out = site.folder / f"{name}-{number}"
        self.out.mkdir()
        self.job_name = f"{site.cluster.job_name}-{name.replace('_', '-')}-{number}"
        self.starts_in_queue: dict[int, Start] = {}
        self._run_id = ""

    def submit(self) -> None:
        """Start, or continue from the newest checkpoint."""
        if self.name == "slurmtrain":
            self._submit_slurmtrain()
        elif self.name == "submitit":
            facts = ["--name", self.job_name, "--nodes", str(NODES), "--partition", PARTITION]
            module = str(BENCHMARKS / "_goodput_submitit.py")
            self.site.run([sys.executable, module, *facts, "--minutes", str(MINUTES), *self._task()])
        else:
            script = shlex.join([str(BENCHMARKS / "_goodput_train.py"), *self._task()])
            self._sbatch(_TORCHRUN.format(python=shlex.quote(sys.executable), nodes=NODES, script=script))

    def jobs(self) -> list[str]:
        """Its jobs in the queue; running ones are recorded."""
        asked_t, jobs = time.time(), []
        command = ["env", "SLURM_TIME_FORMAT=%s", "squeue", "--me", "--noheader", "--format=%A|%T|%S|%D|%j"]
        for line in self.site.cluster.ask(*command).splitlines():
            job, state, begin, nodes, name = line.split("|", 4)
            if name.startswith(self.job_name):
                jobs.append(job)
                if state == "RUNNING" and begin.isdecimal():
                    self.starts_in_queue[int(begin)] = Start(int(begin), int(asked_t) + 1, int(nodes), "UNACCOUNTED")
        return jobs

    def _task(self) -> list[str]:
        numbers = {"--steps": self.steps, "--pause": PAUSE_S, "--every": EVERY}
        return ["--out", str(self.out), *(str(word) for pair in numbers.items() for word in pair)]

    def _sbatch(self, more: str) -> None:
        batch = self.out / "job.sh"
        facts = {"partition": PARTITION, "nodes": NODES, "minutes": MINUTES, "out": self.out}
        batch.write_text(_BATCH.format(name=self.job_name, more=more, **facts))
        self.site.run(["sbatch", "--parsable", str(batch)])

    def _submit_slurmtrain(self) -> None:
        if self._run_id:
            if problem := self.site.try_to(command("resume", self._run_id)):
                say(f"slurmtrain resume: {problem}")
            return
        spec = self.out / "goodput.yaml"
        spec.write_text(
            json.dumps(
                {
                    "name": self.job_name,
                    "command": shlex.join(["python", str(BENCHMARKS / "_goodput_train.py"), *self._task()]),
                    "resources": {"nodes": NODES, "procs_per_node": 1, "time": f"00:{MINUTES}:00"},
                    "slurm": {"partition": PARTITION},
                    "checkpoint": {"every": {"steps": EVERY}},
                    "tracking": {"mlflow": {"enabled": False}},
                }
            )
        )
        [run] = json.loads(self.site.run(command("submit", str(spec), "--executor", "slurm", "--json")))["runs"]
        self._run_id = run["id"]


class Course:
    """One system from its submission to its last step, with the faults of the trace and a hand where it needs one."""

    def __init__(self, system: System, faults: Sequence[Fault]) -> None:
        self._system, self._site = system, system.site
        self._faults = list(faults)
        self._hand = Hand(GONE_S, STUCK_S)
        self._mending: Future[str] | None = None
        self._asked_at = 0.0
        self.outcome = TraceResult(system.name, time.time())

    def run(self) -> TraceResult:
        """Wait until the training is done."""
        outcome, finished = self.outcome, self._system.out / "done"
        deadline = time.monotonic() + PATIENCE_S
        with ThreadPoolExecutor(1) as pool:
            self._hand.lent(time.time())
            self._system.submit()
            while not finished.exists():
                if time.monotonic() > deadline:
                    outcome.lines = log.read(self._system.out)
                    raise TimeoutError(
                        f"{outcome.system}: {len(outcome.lines)} steps, and no end in {PATIENCE_S:.0f} s"
                    )
                time.sleep(POLL_S)
                outcome.lines = log.read(self._system.out)
                self._break(pool)
                self._look_after()
            outcome.ended_t, outcome.load = finished.stat().st_mtime, os.getloadavg()[1]
        self._wait_for_end()
        outcome.lines = log.read(self._system.out)
        accounted = self._site.starts(outcome.began_t, self._system.job_name)
        outcome.starts = log.complete(accounted, list(self._system.starts_in_queue.values()))
        return outcome

    def _break(self, pool: ThreadPoolExecutor) -> None:
        """Inject the next fault if it is due and all nodes are available again."""
        if not self._faults or (self._mending is not None and not self._mending.done()):
            return
        outcome = self.outcome
        at = log.due(self._faults[0], outcome.lines, outcome.faults[-1][1] if outcome.faults else None)
        if at is None or time.time() < at:
            return
        fault = self._faults.pop(0)
        hit_t = self._inflict(fault, pool)
        if hit_t is not None:
            outcome.faults.append((fault.kind, hit_t))
            since = hit_t - outcome.began_t
            say(f"{outcome.system}: {fault.kind} {since:.0f} s after its submission, at step {outcome.lines[-1].step}")

    def _inflict(self, fault: Fault, pool: ThreadPoolExecutor) -> float | None:
        """When it happened; None if the job no longer existed."""
        if fault.kind == log.PREEMPT:
            jobs = self._system.jobs()
            problem = self._site.script("preempt", jobs[0], "--seconds", str(TAKEN_S)) if jobs else "there is no job"
            if problem:
                say(f"{self.outcome.system}: no preemption: {problem}")
            return None if problem else time.time()
        victim, now = log.victim(self._system.out), time.time()
        if fault.kind == log.KILL_RANK:
            os.kill(victim.pid, signal.SIGKILL)
        else:
            if problem := self._site.script("kill-node", victim.host):
                sys.exit(f"bench: {victim.host} could not be killed: {problem}")
            self._mending = pool.submit(self._mend, victim.host)
        return now

    def _mend(self, host: str) -> str:
        time.sleep(DARK_S)
        return self._site.script("start-node", host)

    def _look_after(self) -> None:
        """Do what its user would do if the job is gone or stuck."""
        now = time.time()
        if now - self._asked_at < ASK_S:
            return
        self._asked_at, outcome = now, self.outcome
        jobs = self._system.jobs()
        last_step_t = outcome.lines[-1].t if outcome.lines else 0.0
        why = self._hand.needed(now, in_queue=bool(jobs), last_step_t=last_step_t)
        if why is None or (self._system.out / "done").exists():
            return
        outcome.hands.append(why)
        say(f"{outcome.system}: {why}, a hand is needed {now - outcome.began_t:.0f} s after its submission")
        if jobs:
            self._site.cluster.ask("scancel", *jobs)
            self._site.cluster.wait_until_free()
        self._system.submit()
        self._hand.lent(time.time())

    def _wait_for_end(self) -> None:
        """Wait until none of its jobs is left; jobs that outlive the training are ended and reported."""
        deadline = time.monotonic() + 60
        while jobs := self._system.jobs():
            if time.monotonic() > deadline:
                say(f"{self.outcome.system}: the training is done, and its job does not end")
                self._site.cluster.ask("scancel", *jobs)
                deadline += 60
            time.sleep(1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS, metavar="NAME", help=f"default: {', '.join(SYSTEMS)}"
    )
    parser.add_argument("--rounds", type=int, default=1, metavar="R", help="of each system (default: 1)")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of the trace (default: {SEED})")
    parser.add_argument("--folder", metavar="DIR", help="where to write, seen by all nodes (default: a temporary one)")


def run(arguments: argparse.Namespace) -> Report:
    report = Report()
    systems = [name for name in SYSTEMS if name in arguments.systems]
    steps, kinds = (QUICK_STEPS, log.QUICK) if arguments.quick else (STEPS, log.FULL)
    trace = log.trace(kinds, arguments.seed, *PAUSES_S)
    try:
        with (
            cluster("goodput", CLUSTER_NODES, "--gpus", "0", "--grace", str(GRACE_S)) as slurm,
            tempfile.TemporaryDirectory(prefix="slurmtrain-bench-", dir=arguments.folder) as folder,
        ):
            if not slurm.name:
                raise NoCluster(
                    f"{slurm.conf} is of no cluster of scripts/cluster, and others cannot be broken on purpose"
                )
            site = Site(slurm, Path(folder))
            measure(site, systems, arguments.rounds, steps, trace, report)
    except NoCluster as error:
        print(f"bench: goodput needs a Slurm cluster: {error}", file=sys.stderr)
        sys.exit(2)
    pauses = ", ".join(f"{fault.kind} after {fault.after_s:g} s" for fault in trace)
    report.notes.append(
        f"{steps} steps, a checkpoint every {EVERY}; {pauses}, each since the first step after the last"
    )
    cores = len(os.sched_getaffinity(0))
    report.notes.append(f"load: in the last 5 min of a system, on {cores} cores, which all nodes share")
    report.notes.append("aim: slurmtrain needs no hand, and has the highest goodput")
    return report


def measure(
    site: Site, systems: Sequence[str], rounds: int, steps: int, trace: Sequence[Fault], report: Report
) -> None:
    """Run each system once per round, alternately; first the training undisturbed, to measure a step."""
    say(f"undisturbed: {UNDISTURBED_STEPS} steps under torchrun")
    calm = Course(System(site, "torchrun", UNDISTURBED_STEPS, 0), []).run()
    step_s = log.step_seconds(calm.lines)
    report.figure("undisturbed_step_ms", [step_s * 1e3], "ms")
    outcomes: dict[str, list[TraceResult]] = {name: [] for name in systems}
    for number in range(1, rounds + 1):
        for name in systems if number % 2 else reversed(systems):
            site.wait_until_idle()
            try:
                outcome = Course(System(site, name, steps, number), trace).run()
            except TimeoutError as error:
                site.cluster.cancel()
                report.failures.append(str(error))
                continue
            summary = [
                f"{figure} {samples[0]:.4g}" for figure, (samples, _) in figures([outcome], steps, step_s).items()
            ]
            say(f"{name}: {', '.join(summary)}; {outcome.ends}; load {outcome.load:.1f}")
            outcomes[name].append(outcome)
            if missing := log.missing_steps(outcome.lines, steps):
                report.failures.append(f"{name}: its result lacks {len(missing)} steps, the first is {missing[0]}")
    by_system = {name: figures(of_system, steps, step_s) for name, of_system in outcomes.items() if of_system}
    report_figures(by_system, report)
    for name, of_system in outcomes.items():
        for outcome in of_system:
            report.notes.append(
                f"{name}: load {outcome.load:.1f}; {len(outcome.faults)} faults; its jobs ended as {outcome.ends}"
            )
    if hands := [why for outcome in outcomes.get("slurmtrain", []) for why in outcome.hands]:
        report.failures.append(f"slurmtrain needed a hand {len(hands)} times: {log.counted(hands)}")


def figures(outcomes: Sequence[TraceResult], steps: int, step_s: float) -> Mapping[str, tuple[list[float], str]]:
    """Values and unit of each figure of a system, by name."""
    undisturbed = steps * step_s
    values: dict[str, tuple[list[float], str]] = {
        "goodput": ([undisturbed / one.on_nodes_s for one in outcomes], ""),
        "on_nodes_s": ([one.on_nodes_s for one in outcomes], "s"),
        "wall_s": ([one.ended_t - one.began_t for one in outcomes], "s"),
        "lost_steps": ([float(log.lost_steps(one.lines)) for one in outcomes], "steps"),
        "lost_on_nodes_s": ([one.on_nodes_s - undisturbed for one in outcomes], "s"),
        "hands": ([float(len(one.hands)) for one in outcomes], ""),
    }
    for kind in (log.PREEMPT, log.KILL_RANK, log.KILL_NODE):
        if back := [seconds for one in outcomes for seconds in one.back_after(kind)]:
            values[f"{kind}_to_next_step_s"] = (back, "s")
    return values


def report_figures(by_system: Mapping[str, Mapping[str, tuple[list[float], str]]], report: Report) -> None:
    """All figures, and those that are never zero as ratios to slurmtrain's."""
    for name, values in by_system.items():
        for figure, (samples, unit) in values.items():
            report.figure(f"{name}: {figure}", samples, unit)
    ours = by_system.get("slurmtrain")
    for name, values in by_system.items():
        if ours is None or name == "slurmtrain":
            continue
        for figure in ("goodput", "on_nodes_s", "wall_s"):
            if len(values[figure][0]) == len(ours[figure][0]):
                report.ratio(f"{figure}: {name}/slurmtrain", values[figure][0], ours[figure][0])
