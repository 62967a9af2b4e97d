"""Cases in parallel: each in a home of its own, made from its seed and number alone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from helpers.command_judge import CATEGORIES, judge, snapshot
from helpers.forked_commands import CommandLine, Ended, collect, import_everything, run_forked
from helpers.sample_home import SampleHome, copy_home, make_home

from fuzzing.command_lines import random_command, waits
from fuzzing.mutations import mutate_home
from fuzzing.surroundings import find_long_lines, find_retyped, plans_of
from fuzzing.tracked_runs import TRACKING, fill_caches, write_wandb

# One case in this many starts an interpreter of its own.
_REAL = 50
# A hang lasts longer than any command on a busy machine.
_LIMIT_S = 30.0
_PATIENCE_S = 1.0
_UMASKS = (0o022, 0o022, 0o022, 0o077, 0o000, 0o002)
# How often a case with a single damaged run looks at the others.
_OTHERS = 0.2
STATUS = ("status", "--all", "--json")
_FACTS = ("state", "step", "attempt", "job_id", "reason")
_MAIN = "import sys; sys.executable = sys.argv.pop(1); from slurmtrain.cli import main; main()"


@dataclass(frozen=True, slots=True)
class Options:
    """What to try: so many cases from ``first`` on, or those of so many seconds if these are fewer."""

    seed: int
    cases: int
    seconds: float | None
    workers: int
    first: int = 0


@dataclass(slots=True)
class Report:
    """How many cases there were, how long they took, and what was wrong in which."""

    seed: int
    cases: int = 0
    seconds: float = 0.0
    real: int = 0
    interrupted: int = 0
    commands: dict[str, int] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Failing cases by category."""
        return {
            category: sum(any(each.startswith(f"{category}:") for each in case["wrong"]) for case in self.failures)
            for category in CATEGORIES
        }


class CaseRunner:
    """Runs cases one after the other below ``place``, from the sample ``template``."""

    def __init__(self, seed: int, template: SampleHome, place: Path, facts: dict[str, Any]) -> None:
        """``facts``: what is known of the runs of the template."""
        self.seed = seed
        self.template = template
        self.place = place
        self.facts = facts

    def run(self, number: int) -> dict[str, Any]:
        """Run a case, and again if it took too long: the machine may have been busy. Keeps the tree of a bad one."""
        case = self._run_once(number)
        if any(each.startswith("hang:") for each in case["wrong"]):
            shutil.rmtree(case["tree"])
            case = self._run_once(number)
        if not case["wrong"]:
            _remove(Path(case.pop("tree")))
        return case

    def _run_once(self, number: int) -> dict[str, Any]:
        random = Random(f"{self.seed}/{number}")
        home = copy_home(self.template, self.place / f"case-{self.seed}-{number}")
        mutated = mutate_home(home, random)
        name, arguments = random_command(home, random)
        damaged = only_run(mutated.changes, home.runs)
        if damaged and random.random() < _OTHERS:
            name, arguments = "status", [*STATUS]
        command = CommandLine(
            arguments=arguments,
            cwd=home.project,
            environ=mutated.environ,
            python=str(home.python),
            stdout=random.choices(["pipe", "full", "closed"], weights=[60, 1, 1])[0],
            umask=random.choice(_UMASKS),
            interrupt_s=_PATIENCE_S if waits(arguments) else None,
            limit_s=_LIMIT_S + (_PATIENCE_S if waits(arguments) else 0.0),
            limits=mutated.limits,
        )
        plans = plans_of(home)
        before = snapshot(home.path)
        is_real = number % _REAL == 0 and command.stdout == "pipe"
        ended = run_real(command) if is_real else run_forked(command)
        after = snapshot(home.path)
        return {
            "case": number,
            "real": is_real,
            "name": name,
            "command": arguments,
            "changed": mutated.changes,
            "stdout": command.stdout,
            "seconds": round(ended.seconds, 2),
            "code": ended.code,
            "wrong": [
                *judge(arguments, ended, home=home, before=before, after=after),
                *find_retyped(home, plans),
                *find_long_lines(arguments, ended.output + ended.errors),
                *(
                    self._others(damaged, ended)
                    if tuple(arguments) == STATUS and damaged and command.stdout == "pipe"
                    else ()
                ),
            ],
            "errors": ended.errors[-3000:].decode(errors="replace"),
            "tree": str(home.path),
        }

    def _others(self, damaged: str, ended: Ended) -> list[str]:
        """What the damage of one run has changed in what is known of the others."""
        try:
            listed = facts_of_runs(ended.output)
        except ValueError:
            return [f"others: not listed: {ended.errors[:200].decode(errors='replace')}"]
        wrong = [run_id for run_id, facts in self.facts.items() if run_id != damaged and listed.get(run_id) != facts]
        return [f"others: {run_id} is shown as {listed.get(run_id)}" for run_id in wrong]


def facts_of_runs(output: bytes) -> dict[str, Any]:
    """What ``status --json`` has printed about each run. Raises ValueError for anything else."""
    return {run["id"]: [run[key] for key in _FACTS] for run in json.loads(output)["runs"]}


def only_run(changes: Sequence[str], runs: Path) -> str:
    """The only run that was changed; empty if more was."""
    places = {
        match[1] if (match := re.search(f"{re.escape(str(runs))}/([^/ ]+)/", change)) else "" for change in changes
    }
    return places.pop() if len(places) == 1 else ""


def run_real(command: CommandLine) -> Ended:
    """Run a command in an interpreter of its own."""
    output, errors = os.pipe(), os.pipe()
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", _MAIN, command.python, *map(os.fsencode, command.arguments)],
        cwd=command.cwd,
        env={**command.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        stdin=subprocess.DEVNULL,
        stdout=output[1],
        stderr=errors[1],
        umask=command.umask,
        start_new_session=True,
        preexec_fn=command.set_limits,
    )
    os.close(output[1])
    os.close(errors[1])
    ended = collect(process.pid, output[0], errors[0], command, began)
    process.returncode = ended.code  # collect() has reaped it
    return ended


def _remove(tree: Path) -> None:
    """Remove a tree whose folders may have any mode."""
    for folder, folders, _ in os.walk(os.fsencode(tree)):
        for name in folders:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                os.chmod(path, 0o700)
    shutil.rmtree(os.fsencode(tree))


def run_cases(options: Options, place: Path) -> Iterator[dict[str, Any]]:
    """Run cases in ``options.workers`` processes; yields each as it ends. ``place``: an empty directory."""
    import_everything()
    template = make_home(place / "template", TRACKING)
    write_wandb(template)
    facts = _fill_registry(template)
    fill_caches(template)
    deadline = None if options.seconds is None else time.monotonic() + options.seconds
    pipes = []
    for worker in range(options.workers):
        reader, writer = os.pipe()
        if os.fork() == 0:
            _work(options, CaseRunner(options.seed, template, place, facts), worker, writer, deadline)
        os.close(writer)
        pipes.append(reader)
    yield from _merged(pipes)
    statuses = [os.wait()[1] for _ in pipes]
    if any(statuses):
        raise SystemExit("fuzz: a worker has failed, and its cases are missing")


def _fill_registry(template: SampleHome) -> dict[str, Any]:
    """Let a command read all runs once, as some command has before most others; returns what is known of them."""
    ended = run_forked(CommandLine(arguments=STATUS, cwd=template.project, environ=template.environ(), limit_s=60.0))
    if ended.code != 0:
        raise SystemExit(f"fuzz: the sample is wrong: {ended.errors.decode(errors='replace')}")
    return facts_of_runs(ended.output)


def _work(options: Options, runner: CaseRunner, worker: int, writer: int, deadline: float | None) -> None:
    """In a worker: run every case that is its, print each as a line of JSON, and exit."""
    code = 1
    try:
        with os.fdopen(writer, "w") as results:
            for number in range(options.first + worker, options.first + options.cases, options.workers):
                if deadline is not None and time.monotonic() > deadline:
                    break
                results.write(json.dumps(runner.run(number)) + "\n")
                results.flush()
        code = 0
    except KeyboardInterrupt:
        pass
    except BaseException:  # noqa: BLE001 (the parent must not wait for this process)
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def _merged(pipes: Sequence[int]) -> Iterator[dict[str, Any]]:
    import selectors

    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            selector.register(pipe, selectors.EVENT_READ, bytearray())
        while selector.get_map():
            for key, _ in selector.select():
                piece = os.read(key.fd, 65536)
                if not piece:
                    selector.unregister(key.fd)
                    continue
                key.data.extend(piece)
                *lines, rest = key.data.split(b"\n")
                key.data[:] = rest
                yield from map(json.loads, lines)


def fuzz(options: Options, place: Path) -> Report:
    """Run cases and count what is wrong; prints each bad case to stderr as it is found."""
    # A shell that starts this in the background has Ctrl-C ignored, which the commands that get one would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    report, began = Report(options.seed), time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        for case in run_cases(options, place):
            report.cases += 1
            report.real += case["real"]
            report.interrupted += waits(case["command"])
            report.commands[case["name"]] = report.commands.get(case["name"], 0) + 1
            if case["wrong"]:
                report.failures.append(case)
                print(describe(case, options.seed), file=sys.stderr, flush=True)
    report.seconds = time.monotonic() - began
    return report


def describe(case: dict[str, Any], seed: int) -> str:
    """A bad case for a person: what was wrong, how to repeat it, and where its tree is."""
    lines = [
        f"case {case['case']}: slurmtrain {shlex.join(case['command'])}".encode(errors="backslashreplace").decode()[
            :400
        ],
        *(f"  {wrong}" for wrong in case["wrong"][:5]),
        *(f"  with {change}" for change in case["changed"]),
        f"  again: scripts/fuzz --seed {seed} --case {case['case']}; its tree: {case['tree']}",
    ]
    return "\n".join("".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in lines)
