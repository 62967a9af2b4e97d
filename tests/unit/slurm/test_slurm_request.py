"""What is asked of Slurm: parameters and batch script, and that submitit still takes them."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from helpers.accounts import BOB, give, needs_accounts
from helpers.specs import plan
from submitit import SlurmExecutor

from slurmtrain.model.experiment.slurm_options import PASSED
from slurmtrain.model.experiment.sweep import Pack
from slurmtrain.model.run.layout import ArrayDir, AttemptDir, RunDir
from slurmtrain.slurm.request import SIGNAL_LEAD_S, Elements, Request, make_request

RUN = RunDir(Path("/runs/RUN-ID"))
PROJECT = Path(__file__).parents[3]


def request(run: RunDir = RUN, **keys: Any) -> Request:
    return make_request(plan(**keys), run.submission(1))


def srun_line(job: Request) -> str:
    [line] = [line for line in job.script.split("\n") if line.startswith("srun ")]
    return line


def step(job: Request) -> list[str]:
    """The options of the srun in the batch script, and what its tasks run."""
    return shlex.split(srun_line(job))


def shell(job: Request, command: str) -> str:
    """The batch script with this command in place of srun."""
    return job.script.replace(srun_line(job), command)


def until_srun(job: Request, command: str) -> str:
    """The batch script up to its srun, with this command in place of that."""
    return shell(job, command).partition("\n# teardown\n")[0]


def flags(job: Request) -> dict[str, str | None]:
    """The options of the batch script as sbatch reads them."""
    lines = [line.removeprefix("#SBATCH --") for line in job.script.splitlines() if line.startswith("#SBATCH")]
    options = {}
    for line in lines:
        name, equals, value = line.partition("=")
        assert name not in options, f"--{name} stands twice"
        options[name] = shlex.split(value)[0] if equals else None
    return options


# --- submitit ---------------------------------------------------------------------------------------------------


def test_the_methods_of_submitits_executor_that_ours_replaces_are_there() -> None:
    text = inspect.signature(SlurmExecutor._make_submission_file_text).parameters
    assert list(text) == ["self", "command", "uid"]
    assert list(inspect.signature(SlurmExecutor._make_submission_command).parameters) == [
        "self",
        "submission_file_path",
    ]


def test_each_option_of_the_spec_reaches_sbatch_literally() -> None:
    for name in sorted(PASSED | {"mail_type"}):
        assert flags(request(slurm={name: "some value"}))[name.replace("_", "-")] == "some value", name


# --- parameters -------------------------------------------------------------------------------------------------


NOTHING = ("mem", "gpus-per-node", "partition", "account", "array", "error", "wckey", "contiguous", "qos", "overcommit")
"""What is not asked for unless the spec does."""
ON_EACH = {"nodes": 4, "procs_per_node": 2, "gpus_per_node": 2, "cpus_per_proc": 3}


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({}, {"job-name": "x-RUN-ID", "chdir": "/runs/RUN-ID", "requeue": None, "open-mode": "append"}),
        # One task a node gets the cores of all its processes.
        (
            {"resources": ON_EACH},
            {"nodes": "4", "ntasks-per-node": "1", "cpus-per-task": "6", "gpus-per-node": "2"},
        ),
        ({"resources": {"gpus_per_node": "h100:4", "mem": 0}}, {"gpus-per-node": "h100:4", "mem": "0"}),
        ({"resources": {"mem": "1.5GB"}}, {"mem": "1536M"}),
        # A time limit is in whole minutes, rounded up. A short job is warned a tenth of its time before.
        ({"resources": {"time": "00:30:00"}}, {"time": "30", "signal": "USR2@90"}),
        ({"resources": {"time": "00:00:01"}}, {"time": "1"}),
        ({"resources": {"time": "01:00:01"}}, {"time": "61", "signal": "USR2@90"}),
        ({"resources": {"time": "1-0"}}, {"time": "1440"}),
        ({"resources": {"time": "00:02:00"}}, {"signal": "USR2@15"}),
        ({"resources": {"time": "00:10:00"}}, {"signal": "USR2@60"}),
        ({}, {"signal": f"USR2@{SIGNAL_LEAD_S}"}),
        ({"requeue": {"lead": "300s"}}, {"signal": "USR2@300"}),
        ({"requeue": {"lead": "5m"}, "resources": {"time": "00:06:00"}}, {"signal": "USR2@300"}),
        ({"requeue": {"enabled": False}}, {"no-requeue": None}),
        # True is the bare flag, false and null are nothing, and zero is a value. The wckey is not submitit's.
        ({"slurm": {"exclusive": True, "contiguous": False, "qos": None}}, {"exclusive": None}),
        ({"slurm": {"nice": 0, "priority": 0, "delay-boot": 0}}, {"nice": "0", "priority": "0", "delay-boot": "0"}),
        ({"slurm": {"wckey": "mine", "core-spec": 0}}, {"wckey": "mine", "core-spec": "0"}),
    ],
)  # fmt: skip
def test_the_options_of_a_job_are_those_of_its_spec(keys: dict[str, Any], options: dict[str, str | None]) -> None:
    actual = flags(request(**keys))
    assert {name: actual[name] for name in options} == options
    assert not actual.keys() & (set(NOTHING) - options.keys())
    assert ("requeue" in actual) != ("no-requeue" in actual)


def test_gpus_of_a_type_and_all_memory_are_requested_for_packs_and_components() -> None:
    array = ArrayDir(Path("/runs/arrays/A"))
    packed = flags(
        make_request(plan(resources={"gpus_per_node": "h100:1", "mem": 0}), array, Elements(2, pack=Pack(3)))
    )
    assert (packed["gpus-per-node"], packed["mem"]) == ("h100:3", "0")
    parts = [{"nodes": 1, "gpus_per_node": "h100:4"}, {"nodes": 1, "gpus_per_node": "a100:2", "mem": "1GB"}]
    script = request(resources={"mem": 0, "components": parts}).script
    assert "#SBATCH --gpus-per-node=h100:4\n" in script
    assert "#SBATCH --gpus-per-node=a100:2\n#SBATCH --job-name" in script


def test_a_job_that_can_do_with_fewer_nodes_outlives_one_of_them() -> None:
    job = request(resources={"nodes": {"min": 2, "max": 4}, "spares": 1})
    options = flags(job)
    assert options["nodes"] == "3-5"
    assert "no-kill" in options
    # Among sbatch's options it would get the job the least number of nodes, always.
    assert "ntasks-per-node" not in options
    assert "--ntasks-per-node=1" in step(job)
    assert {"--kill-on-bad-exit=0", "--no-kill", "--wait=0"} <= set(step(job))
    fixed = request(resources={"nodes": 4})
    assert "no-kill" not in flags(fixed)
    assert {"--kill-on-bad-exit=1", "--wait=120"} <= set(step(fixed))


@pytest.mark.parametrize(("own", "expected"), [(None, "singleton"), ("afterok:7", "afterok:7,singleton")])
def test_a_job_that_follows_another_of_its_run_does_not_begin_beside_it(own: str | None, expected: str) -> None:
    options = plan(slurm={"dependency": own} if own else {})
    assert flags(make_request(options, RUN.submission(2), singleton=True))["dependency"] == expected
    assert flags(make_request(options, RUN.submission(2))).get("dependency") == own


# --- shell ------------------------------------------------------------------------------------------------------

STRICT = ["set -euo pipefail"]
ODD = RunDir(Path('/runs of mine/it\'s "$HOME" `id` ünï;&|/RUN-ID'))


def run_prologue(run: RunDir, setup: list[str], print_this: str) -> str:
    """What the batch script prints in place of srun; a run that does not exist has no command, and no setup."""
    completed = subprocess.run(
        ["bash", "-euc", until_srun(request(run, setup=setup), f"printf %s {print_this}")],
        capture_output=True,
        check=True,
        env={"PATH": "/usr/bin:/bin"},
    )
    return completed.stdout.decode()


@dataclass
class Job:
    """A job whose batch script is run without Slurm, up to its srun."""

    root: Path
    elsewhere: Path

    def run(
        self, *setup: str, print_this: str = "", variables: dict[str, str] | None = None, teardown: Sequence[str] = ()
    ) -> str:
        submission = RunDir(self.root / "RUN-ID").submission(1)
        submission.submitit.mkdir(parents=True, exist_ok=True)
        planned = replace(plan(setup=list(setup), teardown=list(teardown)), workdir=str(self.elsewhere))
        submission.plan.write_text(json.dumps(planned.to_json()))
        script = self.root / "script"
        srun = f'printf "%s" {print_this}'
        script.write_text(until_srun(make_request(planned, submission), srun))
        path = f"{self.root}/bin:/usr/bin:/bin"
        environ = {"PATH": path, "SLURM_JOB_ID": "7", "PYTHONPATH": str(PROJECT), **(variables or {})}
        completed = subprocess.run(
            ["bash", str(script)], capture_output=True, text=True, check=not teardown, env=environ, cwd=self.root
        )
        return completed.stdout

    @property
    def log(self) -> str:
        return (self.root / "RUN-ID/attempts/7.0/logs/setup-0.log").read_text()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "elsewhere").mkdir()
    return Job(tmp_path, tmp_path / "elsewhere")


@needs_accounts
@pytest.mark.parametrize("planted", ["folder", "pickle"])
def test_a_job_runs_nothing_that_somebody_else_has_put_in_the_place_of_its_run(tmp_path: Path, planted: str) -> None:
    submission = RunDir(tmp_path / "run").submission(1)
    submission.submitit.mkdir(parents=True)
    pickle = submission.submitit / "7_submitted.pkl"
    pickle.touch()
    script = shell(make_request(plan(setup=[]), submission), "echo began")

    def run_script() -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "SLURM_JOB_ID": "7"}
        return subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, check=False)

    assert run_script().stdout == "began\n"
    place = give(submission.submitit if planted == "folder" else pickle, BOB)
    refused = run_script()
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"{place} does not belong to the user of this job" in refused.stderr


def test_the_prologue_exports_the_run_directory_whatever_characters_it_has() -> None:
    # Python alone takes some of them for line breaks.
    for run in (ODD, RunDir(Path("/runs/a\u2028\x85\x0b\x0c\x1cb/RUN-ID"))):
        assert run_prologue(run, [], '"$SLURMTRAIN_RUN_DIR|$SLURMTRAIN_RUN_ID"') == f"{run.path}|RUN-ID"


def test_setup_lines_run_in_their_order_and_know_the_run(job: Job) -> None:
    # Braces are no template.
    setup = ["A=1", 'B="$A$SLURMTRAIN_RUN_ID"', "C='${B}{{ run_id }}{% if %}{# x #}'", "", "# a comment"]
    assert job.run(*setup, print_this='"$B|$C"') == "1RUN-ID|${B}{{ run_id }}{% if %}{# x #}"


def test_setup_runs_where_the_command_does_and_the_agent_starts_where_the_job_does(job: Job) -> None:
    # "python -m", which starts it, imports what it finds in the current directory first.
    assert job.run("A=$PWD", print_this='"$A|$PWD|$SLURMTRAIN_SETUP_DIR"') == f"{job.elsewhere}|{job.root}|"
    assert job.run("cd /usr", print_this='"$PWD|$SLURMTRAIN_SETUP_DIR"') == f"{job.root}|/usr"


@pytest.mark.parametrize(
    ("setup", "code", "line"),
    [
        (["true", "false"], 1, 2),
        (["A=1", "nosuchprogram --x", "export B=1"], 127, 2),
        (["if true; then", "  true", "fi", "cd /nosuch || exit 4"], 4, 4),
        (["f() { true; false; }", "", "f"], 1, 3),
        (["set -e", "f() { false; true; }", "f"], 1, 3),
        (["source ./failing.sh"], 3, 1),
        (["exit 0"], 0, 1),
        (["true |\n  false"], 1, 1),
        (["set -u", "echo $NOSUCH"], 1, 0),
    ],
)
def test_a_line_that_fails_ends_setup_and_is_named(setup: list[str], code: int, line: int, job: Job) -> None:
    (job.elsewhere / "failing.sh").write_text("false\ntrue\nreturn 3\n")
    more = [*setup, "export AFTER=1"]
    printed = job.run(*more, print_this='"$SLURMTRAIN_SETUP_FAILED|$AFTER|$PWD"')
    failed, after, place = printed.split("|")
    # in a pipe of several lines, bash names its last
    assert (failed.split()[0], after, place) == (str(code), "", str(job.root))
    assert int(failed.split()[1]) in ({line, line + 1} if "|\n" in setup[0] else {line})


PASSES = (
    "false || true", "[ -f /nosuch ] && echo", "source ./activate.sh", "grep -q x /dev/null | cat",
    "if false; then echo; fi", "(exit 3) || true", "sleep 0 & wait", "trap 'echo bye >/dev/null' EXIT",
    "set -euo pipefail", "shopt -s nullglob; IFS=,", "exec 2>/dev/null",
)  # fmt: skip


def test_what_set_e_lets_pass_does_not_fail(job: Job) -> None:
    # Activation scripts use unset variables, and tests that fail.
    (job.elsewhere / "activate.sh").write_text('[ -n "$NOSUCH" ]\nfalse\ngrep -q x /dev/null\nexport ACTIVE=1\n')
    shown = '"$SLURMTRAIN_SETUP_FAILED|$AFTER"'
    # A failure would be told with the number of its line.
    assert job.run("echo first", *PASSES, "export AFTER=1", print_this=shown) == "|1"
    assert job.log == "first\n"
    assert job.run("[ -f /nosuch ] && echo", "export AFTER=1", print_this=shown) == "|1"


def test_a_signal_during_setup_has_teardown_run_with_what_setup_has_exported(job: Job) -> None:
    teardown = ["echo removing $STAGED in $PWD", "tr '\\0' ' ' </proc/$$/cmdline"]
    job.run("export STAGED=1", "kill -TERM $$; sleep 5", teardown=teardown)
    log = (job.root / "RUN-ID/attempts/7.0/logs/teardown-0.log").read_text()
    assert log == f"removing 1 in {job.elsewhere}\nbash /dev/fd/9 "


def test_teardown_also_runs_if_there_was_no_agent_after_setup_which_may_choose_python(job: Job) -> None:
    (job.elsewhere / "python").touch(0o755)
    setup, shown = "export STAGED=1 PATH=$PWD:$PATH", '"$SLURMTRAIN_PYTHON"'
    assert job.run(setup, print_this=shown, teardown=["echo removing $STAGED"]) == f"{job.elsewhere}/python"
    log = job.root / "RUN-ID/attempts/7.0/logs/teardown-0.log"
    assert log.read_text() == "removing 1\n"
    (job.root / "RUN-ID/attempts/7.0/node-0.jsonl").touch()
    assert job.run("export STAGED=2", print_this=shown, teardown=["echo removing $STAGED"]) == ""
    assert log.read_text() == "removing 1\n"


def test_the_agent_keeps_its_own_variables_of_python_and_ranks_get_those_of_setup(job: Job) -> None:
    setup = ["export PYTHONHOME=/x PYTHONPATH='/a b:$PYTHONPATH'", "unset PYTHONSTARTUP", "PYTHONOTHER=1"]
    names = ("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "SLURMTRAIN_RANK_PYTHONHOME", "SLURMTRAIN_RANK_PYTHONPATH")
    printed = job.run(
        *setup,
        print_this='"' + "|".join(f"${name}" for name in names) + '|$SLURMTRAIN_RANK_VARIABLES"',
        variables={"PYTHONSTARTUP": "/start"},
    )
    assert printed == f"|{PROJECT}|/start|/x|/a b:$PYTHONPATH|PYTHONHOME PYTHONPATH "


@pytest.mark.parametrize("where", [RUN, ODD])
def test_the_whole_script_is_valid_shell(where: RunDir) -> None:
    job = request(where, setup=["module load 'a b'"], slurm={"comment": 'it\'s "$x" `y`'})
    subprocess.run(["bash", "-n"], input=job.script.encode(), check=True)
    assert step(job)[-6:] == ["-X", "utf8", "-u", "-m", "slurmtrain.runtime.task", str(job.folder)]
    assert flags(job)["comment"] == 'it\'s "$x" `y`'
    assert flags(job)["chdir"] == str(where.path)


@pytest.mark.parametrize("name", ["0123abcd.pkl", "7_submitted.pkl"])
def test_the_job_finds_its_pickle_though_its_submission_was_killed_before_submitit_named_it(
    tmp_path: Path, name: str
) -> None:
    run = RunDir(tmp_path / "it's a run")
    folder = run.submission(1).submitit
    folder.mkdir(parents=True)
    (folder / name).write_text("the function")
    if name == "7_submitted.pkl":
        (folder / "7_0_result.pkl").write_text("another")
    script = shell(request(run), "exit 0")
    for _ in range(2):  # a job that was put back into the queue finds it too
        subprocess.run(["bash", "-euc", script], check=True, env={"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7"})
        assert (folder / "7_submitted.pkl").read_text() == "the function"


@pytest.mark.parametrize(
    ("intent", "code", "setup", "expected"),
    [
        ("", 3, STRICT, (3, [])),
        ("requeue", 9, STRICT, (0, ["requeue incomplete 7"])),
        ("no-requeue", 0, [], (0, ["update JobId=7 Requeue=0"])),
        ("no-requeue", 3, STRICT, (3, ["update JobId=7 Requeue=0"])),
    ],
)
def test_the_batch_script_does_after_its_tasks_what_an_agent_could_not(
    tmp_path: Path, intent: str, code: int, setup: list[str], expected: tuple[int, list[str]]
) -> None:
    run, calls = RunDir(tmp_path / "it's a run"), tmp_path / "calls"
    attempt = run.attempt("7", 2)
    attempt.path.mkdir(parents=True)
    for path in (attempt.requeue, attempt.no_requeue):
        if path.name == intent:
            path.write_text("{}")
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    scontrol.chmod(0o755)
    script = tmp_path / "script"
    script.write_text(shell(request(run, setup=setup), f"(exit {code})"))
    job = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}
    completed = subprocess.run(["bash", str(script)], check=False, env=job)
    assert (completed.returncode, calls.read_text().splitlines() if calls.exists() else []) == expected


# --- job arrays -----------------------------------------------------------------------------------------------------


def test_a_job_array_asks_for_its_elements_and_writes_the_output_of_each_into_its_run() -> None:
    array_request = make_request(plan(), ArrayDir(Path("/runs/arrays/A1")), Elements(40, at_once=8))
    options = flags(array_request)
    assert (options["array"], options["job-name"]) == ("0-39%8", "x-A1")
    assert options["output"] == "/runs/arrays/A1/elements/%a/submitit/%A_%a_0_log.out"
    assert "--output=/runs/arrays/A1/elements/%a/submitit/%A_%a_%t_log.out" in step(array_request)
    assert flags(make_request(plan(), ArrayDir(Path("/runs/arrays/A1")), Elements(2)))["array"] == "0-1"


@pytest.fixture
def element(tmp_path: Path) -> tuple[ArrayDir, list[AttemptDir]]:
    """An array whose element 3 is the job of a run, or in packs of two of two runs, and their attempts."""
    array = ArrayDir(tmp_path / "it's an array")
    for path in (array.submitit, array.elements):
        path.mkdir(parents=True)
    (array.submitit / "abc.pkl").write_text("pickle")
    attempts = []
    for slot in range(2):
        run = RunDir(tmp_path / f"it's run {slot}")
        attempts.append(run.attempt("7_3", 0))
        for path in (run.submission(1).submitit, attempts[-1].path):
            path.mkdir(parents=True)
        array.element(3, slot).symlink_to(run.submission(1).path)
    array.element(3).symlink_to(attempts[0].run.submission(1).path)
    put_scontrol(array.path)
    return array, attempts


def put_scontrol(folder: Path, calls: str = "/dev/stdout") -> None:
    """Have a scontrol there that writes its arguments to a file."""
    (folder / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    (folder / "scontrol").chmod(0o755)


def run_element(
    array: ArrayDir, index: int, command: str, pack: Pack | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the batch script of an element, with this command instead of srun."""
    script = shell(make_request(plan(), array, Elements(4, pack=pack)), command)
    job = {"SLURM_JOB_ID": "11", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(index)}
    environ = {"PATH": f"{array.path}:/usr/bin:/bin", **job}
    return subprocess.run(["bash", "-c", script], check=False, env=environ, capture_output=True, text=True)


@pytest.mark.parametrize("pack", [None, Pack(2)])
def test_an_element_enters_its_run(element: tuple[ArrayDir, list[AttemptDir]], pack: Pack | None) -> None:
    array, [attempt, _] = element
    pickle = attempt.run.submission(1).submitit / "7_3_submitted.pkl"
    command = 'printf "%s\\n" "$PWD" "$SLURMTRAIN_RUN_DIR" "$SLURMTRAIN_RUN_ID"' if pack is None else "true"
    completed = run_element(array, 3, command, pack)
    assert completed.returncode == 0, completed.stderr
    run = attempt.run
    assert completed.stdout.splitlines() == ([str(run.path), str(run.path), run.id] if pack is None else [])
    assert pickle.read_text() == "pickle"
    other = run_element(array, 2, "echo ran")
    assert (other.returncode, other.stdout) == (1, "")
    assert "job 7_2 has no run" in other.stderr


# --- packs ------------------------------------------------------------------------------------------------------------


def test_the_job_of_a_pack_has_a_task_for_each_run_which_writes_its_output_into_it() -> None:
    wide = plan(resources={"cpus_per_proc": 2, "procs_per_node": 3, "gpus_per_node": 3, "mem": "1GB"})
    job = make_request(wide, ArrayDir(Path("/runs/arrays/A1")), Elements(2, pack=Pack(4)))
    options = flags(job)
    assert (options["array"], options["nodes"], options["ntasks-per-node"]) == ("0-1", "1", "4")
    assert (options["cpus-per-task"], options["gpus-per-node"], options["mem"]) == ("6", "12", "4096M")
    last = ["--kill-on-bad-exit=0", "--wait=0", "--output=/runs/arrays/A1/elements/%a.%t/submitit/%A_%a_0_log.out"]
    assert [word for word in step(job) if word in last] == last


@pytest.mark.parametrize(
    ("intents", "expected"),
    [
        (("requeue",), "requeue incomplete 7_3\n"),
        (("no-requeue",), "update JobId=7_3 Requeue=0\n"),
        (("requeue", "no-requeue"), "requeue incomplete 7_3\n"),
        (("no-requeue", "requeue"), "requeue incomplete 7_3\n"),
        (("requeue", "requeue"), "requeue incomplete 7_3\n"),
        (("requeue", ""), "requeue incomplete 7_3\n"),
        (("no-requeue", "no-requeue"), "update JobId=7_3 Requeue=0\n"),
        # One agent was killed: Slurm may be about to start the job again, rightly.
        (("no-requeue", ""), ""),
    ],
)
def test_the_batch_script_of_an_element_requeues_it_alone_and_once_if_any_run_is_to_go_on(
    element: tuple[ArrayDir, list[AttemptDir]], intents: tuple[str, ...], expected: str
) -> None:
    array, attempts = element
    for attempt, intent in zip(attempts, intents, strict=False):
        if intent:
            (attempt.path / intent).write_text("{}")
    assert run_element(array, 3, "true", Pack(2) if len(intents) == 2 else None).stdout == expected
