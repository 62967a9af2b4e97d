"""The process that reads a script's metrics from what it writes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.simulated_run import RUN_ID, SimulatedRun
from helpers.site import until

from slurmtrain.model.experiment.tracking import ScriptMetricsSpec
from slurmtrain.model.run.layout import AttemptDir, RunDir, RunsRoot, SubmissionDir
from slurmtrain.runtime.agent import script_metrics
from slurmtrain.runtime.agent.script_metrics import Orders, OutputReader, OutputWatch, send_live
from slurmtrain.runtime.environment.variables import environment_of_helper
from slurmtrain.runtime.job.run_reader import logged_step

CSV = {"file": "m.csv", "step": "step"}


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    """An attempt whose rank 0 has started."""
    attempt = RunDir(tmp_path / "run").attempt("7", 0)
    attempt.logs.mkdir(parents=True)
    return attempt


@contextmanager
def reader(attempt: AttemptDir, path: Path, spec: dict[str, Any] | None) -> Iterator[OutputReader]:
    """Reads what is added to the file from now on; None: by guess."""
    each = OutputReader(Orders.begin_now(None if spec is None else ScriptMetricsSpec(**spec), attempt, path, 0))
    yield each
    each.close()


def written(attempt: AttemptDir, *, guessed: bool = False) -> list[tuple[int, dict[str, float]]]:
    path = attempt.guessed_metrics if guessed else attempt.metrics
    if not path.exists():
        return []
    records = map(json.loads, path.read_text().splitlines())
    return [(record["step"], record.get("metrics", {})) for record in records]


def journal(attempt: AttemptDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in attempt.script_journal.read_text().splitlines()]


def test_lines_are_read_once_and_those_of_progress_bars_too(attempt: AttemptDir) -> None:
    log = attempt.rank_log(0)
    with reader(attempt, log, {"pattern": r"(?P<step>\d+)/9 loss=(?P<loss>\S+)"}) as each:
        assert each.read(last=False)
        log.write_bytes(b"0/9 loss=4\r1/9 loss=3\r2/9 lo")
        each.read(last=False)
        each.read(last=False)
        with log.open("ab") as file:
            file.write(b"ss=2\r\n3/9 loss=1")
        each.read(last=False)
        assert written(attempt) == [(0, {"loss": 4.0}), (1, {"loss": 3.0}), (2, {"loss": 2.0})]
        each.read(last=True)
    assert written(attempt)[3:] == [(3, {"loss": 1.0})]
    assert [{**event, "t": 0} for event in journal(attempt)] == [
        {"t": 0, "kind": "script_steps", "step": 0, "total_steps": None},
        {"t": 0, "kind": "script_steps", "last_step": 3, "total_steps": None},
    ]


@pytest.mark.parametrize(
    ("before", "texts", "rows"),
    [
        pytest.param("step,loss\n1,3\n2,2\n", ["step,loss\n1,3\n2,2\n3,1\n"], [(3, 1.0)], id="earlier rows"),
        pytest.param("step,loss\n1,3\n2,2\n", ["step,loss\n1,5\n"], [(1, 5.0)], id="begun anew, and shorter"),
        pytest.param("step,loss\n1,3\n", ["step,loss\n1,5\n2,4\n"], [(1, 5.0), (2, 4.0)], id="begun anew"),
        # As loggers do when there is another column.
        pytest.param("", ["step,loss\n1,3\n", "step,loss,acc\n1,3,\n2,1,0.5\n"], [(1, 3.0), (2, 1.0)], id="rewritten"),
    ],
)  # fmt: skip
def test_each_row_of_a_file_is_read_once_whoever_writes_it_anew(
    attempt: AttemptDir, tmp_path: Path, before: str, texts: list[str], rows: list[tuple[int, float]]
) -> None:
    path = tmp_path / "m.csv"
    if before:
        path.write_text(before)
    with reader(attempt, path, CSV) as each:
        for text in texts:
            path.write_text(text)
            each.read(last=False)
    assert [(step, metrics["loss"]) for step, metrics in written(attempt)] == rows
    assert all(("acc" in metrics) is ("acc" in texts[-1] and step == 2) for step, metrics in written(attempt))


def test_guesses_have_a_file_of_their_own_and_end_when_the_script_reports_itself(attempt: AttemptDir) -> None:
    log = attempt.rank_log(0)
    with reader(attempt, log, None) as each:
        log.write_text("loading 3 files\ninitial loss: 4\nstep 1/9: loss 3\n")
        assert each.read(last=False)
        attempt.rank_journal(0).write_text("")
        with log.open("a") as file:
            file.write("step 2/9: loss 2\n")
        assert not each.read(last=False)
    assert written(attempt) == []
    assert written(attempt, guessed=True)[:2] == [(1, {"loss": 4.0}), (1, {"loss": 3.0})]
    assert [{**event, "t": 0} for event in journal(attempt)] == [
        {"t": 0, "kind": "script_guess", "counted": True, "total_steps": None},
        {"t": 0, "kind": "script_guess", "counted": False, "total_steps": 9},
    ]


def test_a_flood_of_lines_takes_a_small_share_of_a_processor(
    attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_metrics, "_MOST_GUESSING_S", 0.05)
    log = attempt.rank_log(0)
    with reader(attempt, log, None) as each:
        log.write_text("".join(f"step {step}: loss 1.5, acc 0.5\n" for step in range(100_000)))
        begun = time.process_time()
        each.read(last=False)
        assert time.process_time() - begun < 1.0
    assert 0 < len(written(attempt, guessed=True)) < 50_000


def test_no_process_is_started_before_the_output_has_a_metric(
    attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Orders] = []
    monkeypatch.setattr(script_metrics, "_SAMPLE_S", 0.0)
    monkeypatch.setattr(script_metrics, "_start_beside", lambda _module, orders, _problem: started.append(orders))
    log = attempt.rank_log(0)
    watch = OutputWatch(Orders.begin_now(None, attempt, log, 0))
    for text in ("", "reading 12 files\n", "seed 3, lr 0.1\n", "x" * 100_000 + "\n"):
        with log.open("a") as file:
            file.write(text)
        watch.look()
    assert started == []
    with log.open("a") as file:
        file.write("loss: 0.5\n")
    watch.look()
    watch.look()
    watch.end(in_grace=False)
    # It reads what was written before, too.
    assert [orders.begin for orders in started] == [0]


def test_a_script_that_reports_itself_is_never_guessed_at(attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Orders] = []
    monkeypatch.setattr(script_metrics, "_SAMPLE_S", 0.0)
    monkeypatch.setattr(script_metrics, "_start_beside", lambda _module, orders, _problem: started.append(orders))
    watch = OutputWatch(Orders.begin_now(None, attempt, attempt.rank_log(0), 0))
    attempt.rank_journal(0).write_text("")
    attempt.rank_log(0).write_text("loss: 0.5\n")
    watch.look()
    watch.end(in_grace=False)
    assert started == []


def test_a_pattern_that_takes_for_ever_is_given_up(attempt: AttemptDir) -> None:
    log = attempt.rank_log(0)
    with reader(attempt, log, {"pattern": r"(?P<loss>(a+)+)$|loss=(?P<acc>.)"}) as each:
        log.write_text(("a" * 40 + "!\n") * 9 + "loss=1\n")
        assert not each.read(last=False)
    [event] = journal(attempt)
    assert event["why"].endswith("the pattern of tracking.metrics needs more than 0.1 s for a line")


def test_a_missing_column_is_told(attempt: AttemptDir, tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    with reader(attempt, path, CSV) as each:
        path.write_text("iter,loss\n1,3\n")
        assert not each.read(last=False)
    assert "m.csv: there is no column 'step'; the columns are iter, loss" in journal(attempt)[0]["why"]


def test_a_script_that_reports_its_metrics_itself_is_left_alone(attempt: AttemptDir) -> None:
    with reader(attempt, attempt.rank_log(0), {"pattern": r"loss=(?P<loss>\S+)"}) as each:
        attempt.rank_log(0).write_text("loss=1\n")
        attempt.rank_journal(0).write_text("")
        assert not each.read(last=False)
    assert written(attempt) == []


def test_the_process_reads_what_is_left_when_its_agent_is_gone(attempt: AttemptDir) -> None:
    attempt.rank_log(0).write_text("loss=1\nloss=2")
    spec = ScriptMetricsSpec(pattern=r"loss=(?P<loss>\S+)")
    orders = Orders(asdict(spec), str(attempt.path), 0, str(attempt.rank_log(0)), 0, "", 5)
    command = [sys.executable, "-P", "-m", "slurmtrain.runtime.agent.script_metrics"]
    subprocess.run(
        command, input=json.dumps(asdict(orders)).encode() + b"\n", env=environment_of_helper(), check=True, timeout=60
    )
    assert written(attempt) == [(6, {"loss": 1.0}), (7, {"loss": 2.0})]


def test_counting_goes_on_from_the_step_at_which_the_checkpoint_was_saved(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    for restart, lines in enumerate([[(1, 10.0), (2, 20.0), (3, 30.0)], [(3, 40.0)]]):
        path = run.attempt("7", restart).metrics
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps({"t": time, "step": step}) + "\n" for step, time in lines))
    assert [logged_step(run, saved_at) for saved_at in (5.0, 20.0, 25.0, 99.0)] == [None, 2, 2, 3]


# --- a run on a tracking server ---------------------------------------------------------------------------------------


def submission(root: Path) -> SubmissionDir:
    """The submission of a run that has logged one step."""
    directory = RunsRoot(root).run(RUN_ID)
    SimulatedRun(directory, spec={}).submitted().started().reached(1, loss=1.0)
    assert directory.submission(1).plan.exists()
    return directory.submission(1)


def test_a_server_that_never_answers_holds_up_the_start_and_the_end_of_a_job_for_a_moment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_metrics, "_BEGIN_S", 0.1)
    monkeypatch.setattr(script_metrics, "_END_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        sending = send_live(submission(tmp_path), uri, live=False)
        assert sending is not None
        process = psutil.Process(sending._process.pid)
        with silent.accept()[0]:  # it has sent a request
            assert process.nice() > 0
            assert sending.wait_for_run(give_up=lambda: False) is None
            sending.end(in_grace=False)
    until(lambda: not process.is_running(), "the end of the process")


def test_ranks_do_not_wait_for_a_server_that_is_known_to_be_down_nor_after_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_metrics, "_BEGIN_S", 1000.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        sending = send_live(submission(tmp_path), uri, live=False)
        assert sending is not None
        assert sending.wait_for_run(give_up=lambda: True) is None
    assert sending.wait_for_run(give_up=lambda: False) is None
    sending.end(in_grace=True)
