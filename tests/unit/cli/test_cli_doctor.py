"""``slurmtrain doctor``: which of its two uses is meant, what it prints, and what it exits with."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from helpers.fakeslurm import SlurmCommands
from helpers.simulated_run import CRASHED, SimulatedRun
from helpers.siteconfig import CONFIG, PARTITIONS, QOS, config

from slurmtrain.cli import cli
from slurmtrain.errors import SlurmtrainError
from slurmtrain.model.run.layout import RunsRoot

pytestmark = pytest.mark.usefixtures("slurm")

SPEC = "name: x\ncommand: python x.py\nresources: {time: '1:00:00'}\ntracking: {mlflow: {enabled: false}}\n"
RUN = "0000000001"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCommands:
    fake = SlurmCommands(tmp_path / "bin")
    monkeypatch.setenv("PATH", fake.on_path())
    monkeypatch.setenv("SLURMTRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(SPEC)
    fake.replies("scontrol", CONFIG + PARTITIONS)
    fake.replies("sacctmgr", QOS)
    fake.replies("sbatch")
    return fake


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["doctor", *arguments], standalone_mode=False)


def code(result: Result) -> int:
    """What the console script would exit with: commands return it, and errors know theirs."""
    if isinstance(result.exception, SlurmtrainError | click.ClickException):
        return result.exception.exit_code
    assert result.exception is None, result.exception
    return int(result.return_value or 0)


@pytest.fixture
def run(tmp_path: Path) -> RunsRoot:
    """A run on this machine whose only rank had no room."""
    root = RunsRoot(tmp_path / "runs")
    attempt = root.run(RUN).attempt("7", 0)
    failure = {"rank": 0, "pid": 7, "exit_code": 1, "signal": None, "at": 1010.0, "error": None, "last_lines": ["oh"]}
    sim = SimulatedRun(root.run(RUN), executor="local").created(name="heard-of").submitting(host="h").started(host="h")
    sim.ended("crash", at=1010.0, reason=CRASHED, failed_at=1010.0, failures=[failure])
    attempt.logs.mkdir()
    attempt.rank_log(0).write_text("step 1\nOSError: [Errno 28] No space left on device: '/tmp/a'\n")
    return root


def test_a_file_is_a_spec() -> None:
    result = call("x.yaml")
    assert code(result) == 0
    assert "partition spot\n  preemption: by jobs of partition ondemand" in result.output
    assert "ok   Slurm 22.05 does not requeue" in result.output


def test_json_is_all_there_is_on_standard_output(run: RunsRoot) -> None:
    assert json.loads(call("x.yaml", "--json").stdout)["partitions"][0]["partition"] == "spot"
    assert len(json.loads(call("--json").stdout)["partitions"]) == 3
    root = json.loads(call("@last", "--json").stdout)["root"]
    assert (root["name"], root["at"], root["at_by"]) == ("disk-full", "1970-01-01T00:16:50.000Z", "exit")


def test_a_failure_is_exit_code_1_and_comes_with_what_to_do() -> None:
    result = call("x.yaml", "resources.time=5:00:00")
    assert code(result) == 1
    assert (
        "fail partition spot lets a job run for 4 h, not 5 h\n     -> ask for less in resources.time" in result.output
    )


def test_without_an_argument_there_is_a_table_of_partitions() -> None:
    result = call()
    assert code(result) == 0
    rows = [line.split() for line in result.output.splitlines()]
    assert rows[0][:3] == ["PARTITION", "INTERRUPTION", "SECONDS"]
    assert ["spot", "preemption", "30", "its", "own", "agent", "6s", "ok"] in rows
    assert ["ondemand", "preemption", "-", "nobody", "-", "ok"] in rows


def test_what_could_not_be_asked_is_a_warning(slurm: SlurmCommands) -> None:
    slurm.replies("scontrol", config(AccountingStorageType="accounting_storage/none") + PARTITIONS)
    result = call("x.yaml")
    assert code(result) == 0
    assert "warning: unknown: QOS and accounts: this cluster has no accounting" in result.stderr
    assert "warn this cluster has no accounting" in result.output


def test_on_this_machine_there_is_nothing_to_ask() -> None:
    result = call("x.yaml", "--executor", "local")
    assert code(result) == 0
    assert result.output.startswith("on this machine\n  preemption: nothing preempts it\n")


@pytest.mark.parametrize("name", [RUN, "00000", "heard-of", "@last"])
def test_anything_else_is_a_run(run: RunsRoot, name: str) -> None:
    result = call(name)
    assert code(result) == 0
    assert result.output == CliRunner().invoke(cli, ["why", name], standalone_mode=False).output
    first, second, *_ = result.output.splitlines()
    assert first == "the file system of /tmp/a is full"
    assert second == f"  run {RUN} heard-of, failed, attempt 1 of 1: crash"
    assert "root: the file system of /tmp/a is full (rank 0, on h, before 1970-01-01 00:16:50" in result.output
    assert "| OSError: [Errno 28] No space left on device: '/tmp/a'" in result.output
    assert "-> free some space there, or set TMPDIR" in result.output


def test_where_no_pattern_explains_it_what_the_script_raised_is_the_answer(run: RunsRoot) -> None:
    trace = 'Traceback (most recent call last):\n  File "/x/train.py", line 7, in step\nValueError: odd\n'
    run.run(RUN).attempt("7", 0).rank_log(0).write_text(f"step 1\n{trace}")
    result = call("@last")
    assert "root: your script raised ValueError: odd, at train.py:7 in step() (rank 0, on h" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.yaml", "--attempt", "1"], "--attempt needs a RUN, not a SPEC"),
        (["@last", "a=b"], "KEY=VALUE and --executor need a SPEC"),
        (["@last", "--executor", "local"], "KEY=VALUE and --executor need a SPEC"),
        (["missing.yaml"], "this file does not exist"),
        (["@last"], "there is no run '@last'"),
        (["@last", "--attempt", "0"], "x>=1"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    result = call(*arguments)
    assert code(result) == 2
    assert message in f"{result.output}{result.exception}"
