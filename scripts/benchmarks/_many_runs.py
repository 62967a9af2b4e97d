"""Very many run directories with several attempts each.

One run is written as commands and agents write it, and copied under other ids, with other times and values.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from _runs import SPEC

from slurmtrain.model.run.events.agent import AgentStarted, NodeEnded, RendezvousReady, WorkersStarted
from slurmtrain.model.run.events.checkpoint import CheckpointSaved
from slurmtrain.model.run.events.command import RunCreated, Submitted, Submitting
from slurmtrain.model.run.events.rank import SessionStarted, TrainingStarted
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.root import RunsRoot, created_ms, run_id
from slurmtrain.ops.shared.current_plan import run_settings
from slurmtrain.ops.submit import load
from slurmtrain.runtime.job.metrics import MetricsFile
from slurmtrain.system.files import DIRECTORY_MODE
from slurmtrain.system.journal import Journal
from slurmtrain.system.process import Process, this_process

ATTEMPTS = 3
# With two metrics a line, 34 points an attempt, and ten million in 100,000 runs.
LINES = 17
METRICS = 2
# What differs from run to run; each as long in the template as in a copy, so that sizes do not depend on the run.
_ID, _LR, _LOSS = "0123456789", 0.123456, 1.234567
_AT_ONCE = 1000
_TIME = re.compile(r'(?<="t":)[0-9.]+')


@dataclass(frozen=True)
class Template:
    """The files of a run by name, its folders, and when it was written, in seconds since 1970."""

    folders: tuple[str, ...]
    files: tuple[tuple[str, str], ...]
    written_at: float


def make_many_runs(root: Path, count: int, *, newest_at: float | None = None) -> list[str]:
    """This many ended local runs, a minute apart; returns their ids, oldest first.

    Args:
        root: The runs root, which need not exist.
        count: How many.
        newest_at: When the newest was submitted, in seconds since 1970; None: half an hour ago.
    """
    root.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
    template, numbers = _template(), random.Random(0)
    newest_ms = int((newest_at or time.time() - 1800) * 1000)
    ids = [run_id(newest_ms - (count - 1 - index) * 60_000, numbers.getrandbits(10)) for index in range(count)]
    batches = [ids[first : first + _AT_ONCE] for first in range(0, count, _AT_ONCE)]
    with ProcessPoolExecutor() as pool:
        for _ in pool.map(partial(_copy_all, root, template), batches):
            pass
    return ids


def remove_many_runs(root: Path) -> None:
    """Remove a runs root with very many files, if it exists."""
    paths = sorted(path for path in root.iterdir() if path.is_dir()) if root.exists() else []
    batches = [paths[first : first + _AT_ONCE] for first in range(0, len(paths), _AT_ONCE)]
    with ProcessPoolExecutor() as pool:
        for _ in pool.map(_remove_all, batches):
            pass
    shutil.rmtree(root, ignore_errors=True)


def _remove_all(paths: list[Path]) -> None:
    for path in paths:
        shutil.rmtree(path)


def append_points(root: Path, ids: Iterable[str], lines: int, *, before: int = 0) -> list[str]:
    """Append lines of metrics to the newest attempt of each of these runs, and return them all.

    ``before``: how many have been appended to each so far. Steps go on where these end: there is no rollback.
    """
    appended = []
    for each in ids:
        run = RunsRoot(root).run(each)
        path = run.attempt(_job(each, ATTEMPTS), 0).metrics
        now = time.time()
        of_run = [_line(ATTEMPTS * LINES + before + 1 + number, now + number) for number in range(lines)]
        with path.open("a") as file:
            file.writelines(of_run)
        appended += of_run
    return appended


def _line(step: int, at: float) -> str:
    metrics = {"loss": 2.3 / (step + 1), "test_accuracy": 1 - 0.5 / (step + 1)}
    return json.dumps({"t": at, "step": step, "metrics": metrics}) + "\n"


def _copy_all(root: Path, template: Template, ids: list[str]) -> None:
    for each in ids:
        _copy(root, template, each)


def _copy(root: Path, template: Template, run_id: str) -> None:
    numbers, later = random.Random(run_id), created_ms(run_id) / 1000 - template.written_at
    changes = {
        _ID: run_id,
        _ID[-6:]: run_id[-6:],
        str(_LR): f"{10 ** numbers.uniform(-4, 0):.6f}",
        str(_LOSS): f"{numbers.uniform(0.1, 3):.6f}",
    }
    for name in template.folders:
        os.mkdir(root / _changed(name, changes) if name else root / run_id, DIRECTORY_MODE)
    for name, text in template.files:
        handle = os.open(root / _changed(name, changes), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        shifted = _TIME.sub(lambda match: f"{float(match[0]) + later:.6f}", text)
        os.write(handle, _changed(shifted, changes).encode())
        os.close(handle)


def _changed(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        text = text.replace(old, new)
    return text


def _template() -> Template:
    with tempfile.TemporaryDirectory(prefix="slurmtrain-bench-") as folder:
        root = Path(folder)
        _write(RunsRoot(root).run(_ID))
        paths = sorted((root / _ID).rglob("*"))
        folders = [str(path.relative_to(root)) for path in paths if path.is_dir()]
        files = [(str(path.relative_to(root)), path.read_text()) for path in paths if path.is_file()]
    return Template((_ID, *folders), tuple(files), time.time())


def _job(run: str, number: int) -> str:
    return f"local-{run[-6:]}-{number}"


def _write(run: RunDir) -> None:
    """A run of :data:`ATTEMPTS` attempts, the last of which completes it."""
    [planned] = load(SPEC, [f"params.steps={ATTEMPTS * LINES}"], []).runs
    bench = this_process()
    for folder in (run.journals, run.attempts):
        folder.mkdir(mode=DIRECTORY_MODE, parents=True)
    settings = run_settings(planned.plan)
    settings["params"] = {**settings["params"], "lr": _LR}
    with Journal(run.journals / "created.jsonl", durable=False) as journal:
        journal.write(
            RunCreated(name="digits", plan_hash=planned.plan.hash, executor="local", by="bench@here", **settings)
        )
    # No process of this boot started at its first clock tick, so the run is never found alive.
    process = Process(bench.host, bench.boot, bench.pid, 1).to_dict()
    for number in range(1, ATTEMPTS + 1):
        job_id = _job(run.id, number)
        with Journal(run.journals / f"start-{number}.jsonl", durable=False) as journal:
            journal.write(
                Submitting(submission=number, job_id=job_id, attempt=number, executor="local", host=bench.host)
            )
            journal.write(Submitted(submission=number, job_id=job_id, process=process))
        _write_attempt(run, number, process)


def _write_attempt(run: RunDir, number: int, process: dict[str, object]) -> None:
    attempt, host = run.attempt(_job(run.id, number), 0), str(process["host"])
    attempt.path.mkdir(mode=DIRECTORY_MODE)
    first, last = (number - 1) * LINES, number * LINES
    with (
        Journal(attempt.node_journal(0), durable=False) as agent,
        Journal(attempt.rank_journal(0), durable=False) as rank,
    ):
        agent.write(AgentStarted(node=0, nodes=1, host=host, process=process, submission=number, attempt=number))
        agent.write(RendezvousReady(node=0, master_addr="127.0.0.1", master_port=29500, interface="lo"))
        agent.write(WorkersStarted(processes={"0": process, "1": process}))
        rank.write(SessionStarted(step=first, world_size=2, device="cpu"))
        rank.write(TrainingStarted(total_steps=ATTEMPTS * LINES))
        metrics = MetricsFile(attempt.metrics)
        for step in range(first + 1, last + 1):
            metrics.write(step, {"loss": _LOSS, "test_accuracy": 1 - 0.5 / step})
        metrics.close()
        rank.write(CheckpointSaved(step=last, path=f"checkpoints/step-{last}", bytes=840_000, seconds=0.02))
        agent.write(NodeEnded(cause="completed" if number == ATTEMPTS else "preempted"))
