"""What interruptions cost on a real Slurm cluster: slurmtrain, submitit, and sbatch with torchrun.

The same small training on two nodes meets the same faults under each of them. It starts a cluster with scripts/cluster,
which requires root, or uses the one that SLURM_CONF names, which must come from scripts/cluster: other clusters cannot
be broken on purpose.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import _goodput_log as log
from _cluster import Cluster, NoCluster, problem_of, required_cluster, script
from _goodput_log import Fault, Hand, Line, Start
from _measure import (
    BENCHMARKS,
    ROOT,
    Report,
    command,
    run_quietly,
    say,
    submit,
    try_quietly,
    wait_until,
    write_spec,
)  # fmt: skip
from launch import batch_script

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


class Course:
    """One system from its submission to its last step, with the faults of the trace and a hand where it needs one.

    Times are in seconds since 1970. ``out``: a directory that all nodes see.
    """

    def __init__(self, slurm: Cluster, out: Path, system: str, steps: int, faults: Sequence[Fault] = ()) -> None:
        self._slurm, self._out, self.system, self._steps = slurm, out, system, steps
        self._out.mkdir()
        self._job_name = f"{slurm.job_name}-{out.name}"
        self._due = list(faults)
        self._run_id = ""
        self._hand = Hand(GONE_S, STUCK_S)
        self._mending: Future[str] | None = None
        self._asked_at = 0.0
        self._starts_in_queue: dict[int, Start] = {}
        self.began_t, self.ended_t, self.load = time.time(), 0.0, 0.0
        self.hands: list[str] = []
        self.faults: list[tuple[str, float]] = []
        self.lines: list[Line] = []
        self.starts: list[Start] = []

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

    def run(self) -> None:
        """Wait until the training is done."""
        finished = self._out / "done"
        deadline = time.monotonic() + PATIENCE_S
        with ThreadPoolExecutor(1) as pool:
            self._submit()
            while not finished.exists():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self.system}: {len(self.lines)} steps, and no end in {PATIENCE_S:.0f} s")
                time.sleep(POLL_S)
                self.lines = log.read(self._out)
                self._break(pool)
                self._look_after()
            self.ended_t, self.load = finished.stat().st_mtime, os.getloadavg()[1]
        self._wait_for_end()
        self.lines = log.read(self._out)
        self.starts = log.complete(self._accounted(), list(self._starts_in_queue.values()))

    def _submit(self) -> None:
        """Start, or continue from the newest checkpoint, as its user would do."""
        paths = [str(ROOT), str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
        runs = str(self._out / "runs")
        environ = {"SLURM_CONF": self._slurm.conf, "SLURMTRAIN_RUNS": runs, "PYTHONPATH": os.pathsep.join(paths)}
        task = [str(word) for word in (self._out, self._steps, PAUSE_S, EVERY)]
        script = [str(BENCHMARKS / "_goodput_train.py"), *task]
        if self.system == "slurmtrain" and self._run_id:
            if problem := problem_of(try_quietly(command("resume", self._run_id), **environ)):
                say(f"slurmtrain resume: {problem}")
        elif self.system == "slurmtrain":
            spec = write_spec(
                self._out / "goodput.yaml",
                name=self._job_name,
                command=shlex.join(["python", *script]),
                resources={"nodes": NODES, "procs_per_node": 1, "time": f"00:{MINUTES}:00"},
                slurm={"partition": PARTITION},
                checkpoint={"every": {"steps": EVERY}},
            )
            self._run_id = submit(spec, "slurm", **environ)["id"]
        elif self.system == "submitit":
            facts = [self._job_name, str(NODES), PARTITION, str(MINUTES)]
            run_quietly([sys.executable, str(BENCHMARKS / "_goodput_submitit.py"), *task, *facts], **environ)
        else:
            batch = self._out / "job.sh"
            options = {"job-name": self._job_name, "partition": PARTITION, "time": MINUTES, "open-mode": "append"}
            # As an expert in both would write it: failed ranks are restarted in place, and a failed node ends the job.
            text = batch_script(script, NODES, 1, {**options, "output": self._out / "job-%j.log"}, "--max-restarts=3")
            batch.write_text(text)
            run_quietly(["sbatch", "--requeue", str(batch)], **environ)
        self._hand.lent(time.time())

    def _jobs(self) -> list[str]:
        """Its jobs in the queue; running ones are recorded."""
        asked_t, jobs = time.time(), []
        for line in self._slurm.ask("squeue", "--me", "--noheader", "--format=%A|%T|%S|%D|%j").splitlines():
            job, state, begin, nodes, name = line.split("|", 4)
            if name.startswith(self._job_name):
                jobs.append(job)
                if state == "RUNNING" and begin.isdecimal():
                    self._starts_in_queue[int(begin)] = Start(int(begin), int(asked_t) + 1, int(nodes), "UNACCOUNTED")
        return jobs

    def _break(self, pool: ThreadPoolExecutor) -> None:
        """Inject the next fault if it is due and all nodes are available again."""
        if not self._due or (self._mending is not None and not self._mending.done()):
            return
        at = log.due(self._due[0], self.lines, self.faults[-1][1] if self.faults else None)
        if at is None or time.time() < at:
            return
        fault = self._due.pop(0)
        hit_t = self._inflict(fault, pool)
        if hit_t is not None:
            self.faults.append((fault.kind, hit_t))
            since = hit_t - self.began_t
            say(f"{self.system}: {fault.kind} {since:.0f} s after its submission, at step {self.lines[-1].step}")

    def _inflict(self, fault: Fault, pool: ThreadPoolExecutor) -> float | None:
        """When it happened; None if the job no longer existed."""
        if fault.kind == log.PREEMPT:
            jobs = self._jobs()
            problem = self._script("preempt", jobs[0], "--seconds", str(TAKEN_S)) if jobs else "there is no job"
            if problem:
                say(f"{self.system}: no preemption: {problem}")
            return None if problem else time.time()
        victim, now = log.victim(self._out), time.time()
        if fault.kind == log.KILL_RANK:
            os.kill(victim.pid, signal.SIGKILL)
        else:
            if problem := self._script("kill-node", victim.host):
                sys.exit(f"bench: {victim.host} could not be killed: {problem}")
            self._mending = pool.submit(self._mend, victim.host)
        return now

    def _mend(self, host: str) -> str:
        time.sleep(DARK_S)
        return self._script("start-node", host)

    def _script(self, *arguments: str) -> str:
        """Run scripts/cluster on this cluster; return the problem, or nothing."""
        return problem_of(script(*arguments, name=self._slurm.name))

    def _look_after(self) -> None:
        """Do what its user would do if the job is gone or stuck."""
        now = time.time()
        if now - self._asked_at < ASK_S:
            return
        self._asked_at, jobs = now, self._jobs()
        last_step_t = self.lines[-1].t if self.lines else 0.0
        why = self._hand.needed(now, in_queue=bool(jobs), last_step_t=last_step_t)
        if why is None or (self._out / "done").exists():
            return
        self.hands.append(why)
        say(f"{self.system}: {why}, a hand is needed {now - self.began_t:.0f} s after its submission")
        if jobs:
            self._slurm.ask("scancel", *jobs)
            self._slurm.wait_until_free()
        self._submit()

    def _wait_for_end(self) -> None:
        """Wait until none of its jobs is left; jobs that outlive the training are ended and reported."""
        deadline = time.monotonic() + 60
        while jobs := self._jobs():
            if time.monotonic() > deadline:
                say(f"{self.system}: the training is done, and its job does not end")
                self._slurm.ask("scancel", *jobs)
                deadline += 60
            time.sleep(1)

    def _accounted(self) -> list[Start]:
        """All starts of its jobs that accounting knows of; it may lag behind."""
        since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(self.began_t - 5))
        options = ["-X", "-D", "-P", "-n", "-S", since, "--format=JobName,State,Start,End,NNodes"]
        deadline = time.monotonic() + 30
        while True:
            try:
                return log.starts(self._slurm.ask("sacct", *options), self._job_name)
            except ValueError as error:
                if time.monotonic() > deadline:
                    sys.exit(f"bench: {error}, says sacct")
            time.sleep(1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS, metavar="NAME", help=f"default: {', '.join(SYSTEMS)}"
    )
    parser.add_argument("--rounds", type=int, default=1, metavar="R", help="of each system (default: 1)")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of the trace (default: {SEED})")


def run(arguments: argparse.Namespace) -> Report:
    report = Report()
    systems = [name for name in SYSTEMS if name in arguments.systems]
    steps, kinds = (QUICK_STEPS, log.QUICK) if arguments.quick else (STEPS, log.FULL)
    trace = log.trace(kinds, arguments.seed, *PAUSES_S)
    with (
        required_cluster("goodput", CLUSTER_NODES, "--gpus", "0", "--grace", str(GRACE_S)) as slurm,
        tempfile.TemporaryDirectory(prefix="slurmtrain-bench-") as folder,
    ):
        if not slurm.name:
            raise NoCluster(f"{slurm.conf} is of no cluster of scripts/cluster, and others cannot be broken on purpose")
        measure(slurm, Path(folder), systems, arguments.rounds, steps, trace, report)
    pauses = ", ".join(f"{fault.kind} after {fault.after_s:g} s" for fault in trace)
    report.notes.append(
        f"{steps} steps, a checkpoint every {EVERY}; {pauses}, each since the first step after the last"
    )
    cores = len(os.sched_getaffinity(0))
    report.notes.append(f"load: in the last 5 min of a system, on {cores} cores, which all nodes share")
    report.notes.append("aim: slurmtrain needs no hand, and has the highest goodput")
    return report


def measure(
    slurm: Cluster,
    folder: Path,
    systems: Sequence[str],
    rounds: int,
    steps: int,
    trace: Sequence[Fault],
    report: Report,
) -> None:
    """Run each system once per round, alternately; first the training undisturbed, to measure a step."""
    say(f"undisturbed: {UNDISTURBED_STEPS} steps under torchrun")
    calm = Course(slurm, folder / "torchrun-0", "torchrun", UNDISTURBED_STEPS)
    calm.run()
    step_s = log.step_seconds(calm.lines)
    report.figure("undisturbed_step_ms", [step_s * 1e3], "ms")
    outcomes: dict[str, list[Course]] = {name: [] for name in systems}
    for number in range(1, rounds + 1):
        for name in systems if number % 2 else reversed(systems):
            # Even of the job that preempted another one.
            wait_until(lambda: nodes_are_idle(slurm), "the cluster's nodes do not become idle", PATIENCE_S / 5, 1)
            course = Course(slurm, folder / f"{name}-{number}", name, steps, trace)
            try:
                course.run()
            except TimeoutError as error:
                slurm.cancel()
                report.failures.append(str(error))
                continue
            outcomes[name].append(course)
            shown = [f"{figure} {samples[0]:.4g}" for figure, (samples, _) in figures([course], steps, step_s).items()]
            say(f"{name}: {', '.join(shown)}")
            report.notes.append(
                f"{name}: load {course.load:.1f}; {len(course.faults)} faults; its jobs ended as {course.ends}"
            )
            if missing := log.missing_steps(course.lines, steps):
                report.failures.append(f"{name}: its result lacks {len(missing)} steps, the first is {missing[0]}")
    by_system = {name: figures(of_system, steps, step_s) for name, of_system in outcomes.items() if of_system}
    ours = by_system.get("slurmtrain", {})
    for name, values in by_system.items():
        for figure, (samples, unit) in values.items():
            report.figure(f"{name}: {figure}", samples, unit)
            # Those that are never zero.
            compared = ours and name != "slurmtrain" and figure in ("goodput", "on_nodes_s", "wall_s")
            if compared and len(samples) == len(ours[figure][0]):
                report.ratio(f"{figure}: {name}/slurmtrain", samples, ours[figure][0])
    if hands := [why for outcome in outcomes.get("slurmtrain", []) for why in outcome.hands]:
        report.failures.append(f"slurmtrain needed a hand {len(hands)} times: {log.counted(hands)}")


def nodes_are_idle(slurm: Cluster) -> bool:
    states = slurm.ask("sinfo", "--noheader", "--Node", f"--partition={PARTITION}", "--format=%T")
    return set(states.split()) == {"idle"}


def figures(outcomes: Sequence[Course], steps: int, step_s: float) -> Mapping[str, tuple[list[float], str]]:
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
