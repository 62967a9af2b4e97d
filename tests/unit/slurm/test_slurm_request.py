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
from submitit.slurm.slurm import SlurmExecutor, _make_sbatch_string

from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.model.run.root import ArrayDir
from slurmtrain.model.spec.plan import Plan, make_plan
from slurmtrain.model.spec.sbatch import PASSED
from slurmtrain.model.spec.spec import read_spec
from slurmtrain.model.spec.sweep.pack import Pack
from slurmtrain.slurm import request as requests
from slurmtrain.slurm.request import Request, agent_command, make_array_request, make_request, prologue

RUN = RunDir(Path("/runs/RUN-ID"))
PROJECT = Path(__file__).parents[3]


def plan(**keys: Any) -> Plan:
    data = {"name": "x", "command": "python train.py", **keys}
    spec = read_spec(data, lambda at, message: pytest.fail(f"{at}: {message}"))
    return make_plan(spec, workdir="/w", python="/usr/bin/python3", template=data)[0]


def request(run: RunDir = RUN, **keys: Any) -> Request:
    return make_request(plan(**keys), run.submission(1))


def flags(job: Request) -> dict[str, str | None]:
    """The options of the batch script as sbatch reads them."""
    lines = [line.removeprefix("#SBATCH --") for line in job.script("true").splitlines() if line.startswith("#SBATCH")]
    options = {}
    for line in lines:
        name, equals, value = line.partition("=")
        assert name not in options, f"--{name} stands twice"
        options[name] = shlex.split(value)[0] if equals else None
    return options


def test_the_number_of_switches_is_an_option_of_slurms() -> None:
    assert flags(request(slurm={"switches": "1@00:10:00"}))["switches"] == "1@00:10:00"


# --- submitit ---------------------------------------------------------------------------------------------------


def test_submitits_private_script_maker_still_has_the_parameters_that_are_used() -> None:
    parameters = inspect.signature(_make_sbatch_string).parameters
    assert {"command", "folder"} <= parameters.keys()
    every_named = dict.fromkeys(requests._NAMED, "x")
    job = request(
        slurm={**every_named, "wckey": "w", "licenses": "l"}, resources={"gpus_per_node": 2, "mem": "1GB", "time": 5}
    )
    assert job.parameters.keys() <= parameters.keys()
    assert parameters.keys() >= requests._NAMED
    assert not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())


def test_submitits_executor_still_takes_the_parameters_that_are_used() -> None:
    assert request().parameters.keys() <= SlurmExecutor._valid_parameters()


def test_options_that_submitit_does_not_know_by_name_are_passed_on_literally() -> None:
    for name in sorted(PASSED):
        assert flags(request(slurm={name: "v1"}))[name] == "v1", name


# --- parameters -------------------------------------------------------------------------------------------------


def test_one_task_a_node_gets_the_cores_of_all_its_processes() -> None:
    options = flags(request(resources={"nodes": 4, "procs_per_node": 2, "gpus_per_node": 2, "cpus_per_proc": 3}))
    assert options["nodes"] == "4"
    assert options["ntasks-per-node"] == "1"
    assert options["cpus-per-task"] == "6"
    assert options["gpus-per-node"] == "2"
    assert "--cpus-per-task=6" in request(resources={"procs_per_node": 2, "cpus_per_proc": 3}).script("x")


def test_gpus_of_a_type_and_all_memory_are_requested_as_sbatch_has_them() -> None:
    options = flags(request(resources={"gpus_per_node": "h100:4", "mem": 0}))
    assert (options["gpus-per-node"], options["mem"]) == ("h100:4", "0")
    array = ArrayDir(Path("/runs/arrays/A"))
    packed = make_array_request(
        plan(resources={"gpus_per_node": "h100:1", "mem": 0}), array, 2, pack=Pack(3)
    ).parameters
    assert (packed["gpus_per_node"], packed["mem"]) == ("h100:3", "0")
    parts = [{"nodes": 1, "gpus_per_node": "h100:4"}, {"nodes": 1, "gpus_per_node": "a100:2", "mem": "1GB"}]
    script = request(resources={"mem": 0, "components": parts}).script("x")
    assert "#SBATCH --gpus-per-node=h100:4\n" in script
    assert "#SBATCH --gpus-per-node=a100:2\n#SBATCH --job-name" in script


def test_a_job_that_can_do_with_fewer_nodes_outlives_one_of_them() -> None:
    job = request(resources={"nodes": {"min": 2, "max": 4}, "spares": 1})
    options = flags(job)
    assert options["nodes"] == "3-5"
    assert "no-kill" in options
    # Among sbatch's options it would get the job the least number of nodes, always.
    assert "ntasks-per-node" not in options
    assert "--ntasks-per-node=1" in job.parameters["srun_args"]
    assert {"--kill-on-bad-exit=0", "--no-kill", "--wait=0"} <= set(job.parameters["srun_args"])
    fixed = request(resources={"nodes": 4})
    assert "no-kill" not in flags(fixed)
    assert {"--kill-on-bad-exit=1", "--wait=120"} <= set(fixed.parameters["srun_args"])


@pytest.mark.parametrize(("own", "expected"), [(None, "singleton"), ("afterok:7", "afterok:7,singleton")])
def test_a_job_that_follows_another_of_its_run_does_not_begin_beside_it(own: str | None, expected: str) -> None:
    options = plan(slurm={"dependency": own} if own else {})
    assert flags(make_request(options, RUN.submission(2), singleton=True))["dependency"] == expected
    assert flags(make_request(options, RUN.submission(2))).get("dependency") == own


def test_what_the_spec_leaves_open_is_not_asked_for() -> None:
    options = flags(request())
    assert not options.keys() & {"mem", "gpus-per-node", "partition", "account", "array"}


@pytest.mark.parametrize(
    ("time", "minutes"), [("00:30:00", "30"), ("00:00:01", "1"), ("01:00:01", "61"), ("1-0", "1440")]
)
def test_a_time_limit_is_asked_for_in_whole_minutes_rounded_up(time: str, minutes: str) -> None:
    assert flags(request(resources={"time": time}))["time"] == minutes


def test_memory_is_asked_for_in_mebibytes_a_node() -> None:
    assert flags(request(resources={"mem": "1.5GB"}))["mem"] == "1536M"


def test_the_jobs_name_carries_the_runs_id() -> None:
    assert flags(request())["job-name"] == "x-RUN-ID"


def test_the_job_runs_in_the_run_directory_can_be_requeued_and_is_warned_in_time() -> None:
    options = flags(request())
    assert options["chdir"] == "/runs/RUN-ID"
    assert options["requeue"] is None
    assert options["signal"] == f"USR2@{requests.SIGNAL_LEAD_S}"
    assert options["open-mode"] == "append"
    assert "error" not in options


@pytest.mark.parametrize(
    "name", ["partition", "qos", "mail-type", "mail_type", "comment", "nodelist", "reservation", "nice"]
)
def test_an_option_of_the_spec_reaches_sbatch(name: str) -> None:
    assert flags(request(slurm={name: "some value"}))[name.replace("_", "-")] == "some value"


def test_true_is_the_bare_flag_and_false_or_null_is_nothing() -> None:
    options = flags(
        request(slurm={"exclusive": True, "hold": True, "contiguous": False, "qos": None, "overcommit": None})
    )
    assert options["exclusive"] is None
    assert options["hold"] is None
    assert not options.keys() & {"contiguous", "qos", "overcommit"}


@pytest.mark.parametrize("name", ["nice", "priority", "delay-boot", "core-spec"])
def test_zero_is_a_value(name: str) -> None:
    assert flags(request(slurm={name: 0}))[name] == "0"


def test_the_wckey_is_the_specs_and_not_submitits() -> None:
    assert "wckey" not in flags(request())
    assert flags(request(slurm={"wckey": "mine"}))["wckey"] == "mine"


def test_the_same_plan_gives_the_same_script() -> None:
    assert request(slurm={"qos": "a"}).script("x") == request(slurm={"qos": "a"}).script("x")


# --- shell ------------------------------------------------------------------------------------------------------

ODD = RunDir(Path('/runs of mine/it\'s "$HOME" `id` ünï;&|/RUN-ID'))


def run_prologue(run: RunDir, setup: list[str], print_this: str) -> str:
    """What the batch script prints in place of srun; a run that does not exist has no command, and no setup."""
    lines = request(run, setup=setup).parameters["setup"]
    completed = subprocess.run(
        ["bash", "-euc", "\n".join([*lines, f"printf %s {print_this}"])],
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
        script.write_text("\n".join(["#!/bin/bash", prologue(planned, submission), srun]))
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
    script = [*prologue(plan(setup=[]), submission).splitlines(), "echo began"]

    def run_script() -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "SLURM_JOB_ID": "7"}
        return subprocess.run(
            ["bash", "-c", "\n".join(script)], env=environ, capture_output=True, text=True, check=False
        )

    assert run_script().stdout == "began\n"
    place = give(submission.submitit if planted == "folder" else pickle, BOB)
    refused = run_script()
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"{place} does not belong to the user of this job" in refused.stderr


def test_the_prologue_exports_the_run_directory_whatever_characters_it_has() -> None:
    assert run_prologue(ODD, [], '"$SLURMTRAIN_RUN_DIR|$SLURMTRAIN_RUN_ID"') == f"{ODD.path}|RUN-ID"


@pytest.mark.parametrize("character", ["\u2028", "\x85", "\x0b", "\x0c", "\x1c"])
def test_a_character_that_only_python_takes_for_a_line_break_breaks_no_line(character: str, job: Job) -> None:
    assert run_prologue(RunDir(Path(f"/runs/a{character}b/RUN-ID")), [], '"$SLURMTRAIN_RUN_DIR"').count(character) == 1
    assert job.run(f"X='1{character}2'", print_this='"$X"') == f"1{character}2"


def test_setup_lines_run_in_their_order_and_know_the_run(job: Job) -> None:
    setup = ["A=1", 'B="$A$SLURMTRAIN_RUN_ID"', "C='${B}'", "", "# a comment"]
    assert job.run(*setup, print_this='"$B|$C"') == "1RUN-ID|${B}"


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


@pytest.mark.parametrize(
    "line",
    [
        "false || true",
        "[ -f /nosuch ] && echo",
        "source ./activate.sh",
        "grep -q x /dev/null | cat",
        "if false; then echo; fi",
        "(exit 3) || true",
        "sleep 0 & wait",
        "trap 'echo bye >/dev/null' EXIT",
        "set -euo pipefail",
        "shopt -s nullglob; IFS=,",
        "exec 2>/dev/null",
    ],
)
def test_what_set_e_lets_pass_does_not_fail(line: str, job: Job) -> None:
    # Activation scripts use unset variables, and tests that fail.
    (job.elsewhere / "activate.sh").write_text('[ -n "$NOSUCH" ]\nfalse\ngrep -q x /dev/null\nexport ACTIVE=1\n')
    assert job.run("echo first", line, "export AFTER=1", print_this='"$SLURMTRAIN_SETUP_FAILED|$AFTER"') == "|1"
    assert job.log == "first\n"


def test_a_signal_during_setup_has_teardown_run_with_what_setup_has_exported(job: Job) -> None:
    teardown = ["echo removing $STAGED in $PWD", "tr '\\0' ' ' </proc/$$/cmdline"]
    job.run("export STAGED=1", "kill -TERM $$; sleep 5", teardown=teardown)
    log = (job.root / "RUN-ID/attempts/7.0/logs/teardown-0.log").read_text()
    assert log == f"removing 1 in {job.elsewhere}\nbash /dev/fd/9 "


def test_teardown_also_runs_if_there_was_no_agent_after_setup(job: Job) -> None:
    job.run("export STAGED=1", print_this="began", teardown=["echo removing $STAGED"])
    assert (job.root / "RUN-ID/attempts/7.0/logs/teardown-0.log").read_text() == "removing 1\n"
    (job.root / "RUN-ID/attempts/7.0/node-0.jsonl").touch()
    job.run("export STAGED=2", print_this="began", teardown=["echo removing $STAGED"])
    assert (job.root / "RUN-ID/attempts/7.0/logs/teardown-0.log").read_text() == "removing 1\n"


def test_the_agent_keeps_its_own_variables_of_python_and_ranks_get_those_of_setup(job: Job) -> None:
    setup = ["export PYTHONHOME=/x PYTHONPATH='/a b:$PYTHONPATH'", "unset PYTHONSTARTUP", "PYTHONOTHER=1"]
    names = ("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "SLURMTRAIN_RANK_PYTHONHOME", "SLURMTRAIN_RANK_PYTHONPATH")
    printed = job.run(
        *setup,
        print_this='"' + "|".join(f"${name}" for name in names) + '|$SLURMTRAIN_RANK_VARIABLES"',
        variables={"PYTHONSTARTUP": "/start"},
    )
    assert printed == f"|{PROJECT}|/start|/x|/a b:$PYTHONPATH|PYTHONHOME PYTHONPATH "


def test_python_is_what_setup_makes_it_and_else_the_submitters(job: Job) -> None:
    assert job.run("true", print_this='"$SLURMTRAIN_PYTHON"') == ""
    (job.elsewhere / "python").write_text("#!/bin/sh\n")
    (job.elsewhere / "python").chmod(0o755)
    assert job.run("export PATH=$PWD:$PATH", print_this='"$SLURMTRAIN_PYTHON"') == f"{job.elsewhere}/python"


def test_braces_of_a_setup_line_are_not_read_as_a_template() -> None:
    assert (
        "echo {{ run_id }} {% if %} {# x #}"
        in prologue(plan(setup=["echo {{ run_id }} {% if %} {# x #}"]), RUN.submission(1)).splitlines()
    )


def test_the_command_of_a_task_is_quoted() -> None:
    command = agent_command("/my python/it's", Path("/runs/$x"))
    assert shlex.split(command) == ["/my python/it's", "-X", "utf8", "-u", "-m", "slurmtrain.runtime.task", "/runs/$x"]


@pytest.mark.parametrize("where", [RUN, ODD])
def test_the_whole_script_is_valid_shell(where: RunDir) -> None:
    job = request(where, setup=["module load 'a b'"], slurm={"comment": 'it\'s "$x" `y`'})
    script = job.script(agent_command("/usr/bin/python3", job.folder))
    subprocess.run(["bash", "-n"], input=script.encode(), check=True)
    assert flags(job)["comment"] == 'it\'s "$x" `y`'
    assert flags(job)["chdir"] == str(where.path)


def test_the_job_finds_its_pickle_though_its_submission_was_killed_before_submitit_named_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "it's a run")
    folder = run.submission(1).submitit
    folder.mkdir(parents=True)
    (folder / "0123abcd.pkl").write_text("the function")
    script = "\n".join(request(run).parameters["setup"])
    for _ in range(2):  # a job that was put back into the queue finds it too
        subprocess.run(["bash", "-euc", script], check=True, env={"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7"})
        assert (folder / "7_submitted.pkl").read_text() == "the function"


def test_a_job_whose_pickle_has_its_name_keeps_it(tmp_path: Path) -> None:
    folder = RunDir(tmp_path).submission(1).submitit
    folder.mkdir(parents=True)
    (folder / "7_submitted.pkl").write_text("the function")
    (folder / "7_0_result.pkl").write_text("another")
    script = "\n".join(request(RunDir(tmp_path)).parameters["setup"])
    subprocess.run(["bash", "-euc", script], check=True, env={"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7"})
    assert (folder / "7_submitted.pkl").read_text() == "the function"


@pytest.mark.parametrize("setup", [[], ["set -euo pipefail"]])
@pytest.mark.parametrize(
    ("intent", "code", "expected"),
    [
        ("", 0, (0, [])),
        ("", 3, (3, [])),
        ("requeue", 1, (0, ["requeue incomplete 7"])),
        ("requeue", 9, (0, ["requeue incomplete 7"])),
        ("no-requeue", 0, (0, ["update JobId=7 Requeue=0"])),
        ("no-requeue", 3, (3, ["update JobId=7 Requeue=0"])),
    ],
)
def test_the_batch_script_does_after_its_tasks_what_an_agent_could_not(
    tmp_path: Path, intent: str, code: int, expected: tuple[int, list[str]], setup: list[str]
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
    asks = request(run, setup=setup).parameters
    script = tmp_path / "script"
    script.write_text("\n".join([*asks["setup"], f"(exit {code})", *asks["teardown"]]))
    job = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}
    completed = subprocess.run(["bash", str(script)], check=False, env=job)
    assert (completed.returncode, calls.read_text().splitlines() if calls.exists() else []) == expected


def test_a_run_that_is_not_to_start_again_has_a_job_that_slurm_does_not_requeue_either() -> None:
    options = request(requeue={"enabled": False}).parameters["additional_parameters"]
    assert ("no-requeue" in options, "requeue" in options) == (True, False)


@pytest.mark.parametrize(("limit", "lead"), [("00:02:00", 15), ("00:10:00", 60), ("01:00:00", 90), (None, 90)])
def test_a_short_job_is_warned_a_tenth_of_its_time_before_the_limit(limit: str | None, lead: int) -> None:
    assert flags(request(resources={"time": limit}))["signal"] == f"USR2@{lead}"


def test_a_job_is_warned_as_long_before_the_limit_as_the_spec_says() -> None:
    assert flags(request(requeue={"lead": "300s"}))["signal"] == "USR2@300"
    assert flags(request(requeue={"lead": "5m"}, resources={"time": "00:06:00"}))["signal"] == "USR2@300"


# --- job arrays -----------------------------------------------------------------------------------------------------


def test_a_job_array_asks_for_its_elements_and_writes_the_output_of_each_into_its_run() -> None:
    array_request = make_array_request(plan(), ArrayDir(Path("/runs/arrays/A1")), 40, at_once=8)
    options = flags(array_request)
    assert (options["array"], options["job-name"]) == ("0-39%8", "x-A1")
    assert options["output"] == "/runs/arrays/A1/elements/%a/submitit/%A_%a_0_log.out"
    assert array_request.parameters["srun_args"][-1] == "--output=/runs/arrays/A1/elements/%a/submitit/%A_%a_%t_log.out"
    assert flags(make_array_request(plan(), ArrayDir(Path("/runs/arrays/A1")), 2))["array"] == "0-1"


@pytest.fixture
def element(tmp_path: Path) -> tuple[ArrayDir, RunDir]:
    """An array whose element 3 is the job of a run."""
    array, run = ArrayDir(tmp_path / "it's an array"), RunDir(tmp_path / "it's a run")
    for path in (array.submitit, array.elements, run.submission(1).submitit, run.attempt("7_3", 2).path):
        path.mkdir(parents=True)
    (array.submitit / "abc.pkl").write_text("pickle")
    array.element(3).symlink_to(run.submission(1).path)
    return array, run


def run_element(array: ArrayDir, index: int, command: str) -> subprocess.CompletedProcess[str]:
    """Run the batch script of an element, with this command instead of srun."""
    array_request = make_array_request(plan(), array, 4).parameters
    script = "\n".join([*array_request["setup"], command, *array_request["teardown"]])
    job = {
        "SLURM_JOB_ID": "11",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": str(index),
        "SLURM_RESTART_COUNT": "2",
    }
    environ = {"PATH": f"{array.path}:/usr/bin:/bin", **job}
    return subprocess.run(["bash", "-c", script], check=False, env=environ, capture_output=True, text=True)


def test_an_element_enters_its_run(element: tuple[ArrayDir, RunDir]) -> None:
    array, run = element
    pickle = '"$(cat submissions/1/submitit/7_3_submitted.pkl)"'
    command = f'printf "%s\\n" "$PWD" "$SLURMTRAIN_RUN_DIR" "$SLURMTRAIN_RUN_ID" {pickle}'
    completed = run_element(array, 3, command)
    assert completed.stdout.splitlines() == [str(run.path), str(run.path), run.id, "pickle"], completed.stderr
    assert completed.returncode == 0


def test_an_element_without_a_run_runs_nothing(element: tuple[ArrayDir, RunDir]) -> None:
    completed = run_element(element[0], 2, "echo ran")
    assert (completed.returncode, completed.stdout) == (1, "")
    assert "job 7_2 has no run" in completed.stderr


@pytest.mark.parametrize(
    ("intent", "expected"), [("requeue", "requeue incomplete 7_3"), ("no-requeue", "update JobId=7_3 Requeue=0")]
)
def test_the_batch_script_of_an_element_requeues_it_alone(
    element: tuple[ArrayDir, RunDir], intent: str, expected: str
) -> None:
    array, run = element
    (run.attempt("7_3", 2).path / intent).write_text("{}")
    scontrol = array.path / "scontrol"
    scontrol.write_text('#!/bin/sh\necho "$@"\n')
    scontrol.chmod(0o755)
    assert run_element(array, 3, "true").stdout == f"{expected}\n"


# --- packs ------------------------------------------------------------------------------------------------------------


def pack_script(array: ArrayDir, command: str) -> subprocess.CompletedProcess[str]:
    """Run the batch script of element 3 of packs of two, with this command instead of srun."""
    parameters = make_array_request(plan(), array, 4, pack=Pack(2)).parameters
    script = "\n".join([*parameters["setup"], command, *parameters["teardown"]])
    environ = {"PATH": f"{array.path}:/usr/bin:/bin", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    return subprocess.run(["bash", "-c", script], check=False, env=environ, capture_output=True, text=True)


@pytest.fixture
def pack(tmp_path: Path) -> tuple[ArrayDir, list[AttemptDir]]:
    """An array whose element 3 is the job of two runs, and their attempts."""
    array = ArrayDir(tmp_path / "it's an array")
    for path in (array.submitit, array.elements):
        path.mkdir(parents=True)
    (array.submitit / "abc.pkl").write_text("pickle")
    attempts = []
    for slot in range(2):
        run = RunDir(tmp_path / f"it's run {slot}")
        run.submission(1).submitit.mkdir(parents=True)
        array.element(3, slot).symlink_to(run.submission(1).path)
        attempts.append(run.attempt("7_3", 0))
        attempts[-1].path.mkdir(parents=True)
    scontrol = array.path / "scontrol"
    scontrol.write_text('#!/bin/sh\necho "$@"\n')
    scontrol.chmod(0o755)
    return array, attempts


def test_the_job_of_a_pack_has_a_task_for_each_run_which_writes_its_output_into_it() -> None:
    wide = plan(resources={"cpus_per_proc": 2, "procs_per_node": 3, "gpus_per_node": 3, "mem": "1GB"})
    job = make_array_request(wide, ArrayDir(Path("/runs/arrays/A1")), 2, pack=Pack(4))
    options = flags(job)
    assert (options["array"], options["nodes"], options["ntasks-per-node"]) == ("0-1", "1", "4")
    assert (options["cpus-per-task"], options["gpus-per-node"], options["mem"]) == ("6", "12", "4096M")
    assert job.parameters["srun_args"][-3:] == [
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--output=/runs/arrays/A1/elements/%a.%t/submitit/%A_%a_0_log.out",
    ]


def test_the_agents_of_a_pack_find_their_pickle_in_the_folder_of_the_first_run(
    pack: tuple[ArrayDir, list[AttemptDir]],
) -> None:
    array, attempts = pack
    completed = pack_script(array, "true")
    assert completed.returncode == 0, completed.stderr
    assert (attempts[0].run.submission(1).submitit / "7_3_submitted.pkl").read_text() == "pickle"


@pytest.mark.parametrize(
    ("intents", "expected"),
    [
        (("requeue", "no-requeue"), "requeue incomplete 7_3\n"),
        (("no-requeue", "requeue"), "requeue incomplete 7_3\n"),
        (("requeue", "requeue"), "requeue incomplete 7_3\n"),
        (("requeue", ""), "requeue incomplete 7_3\n"),
        (("no-requeue", "no-requeue"), "update JobId=7_3 Requeue=0\n"),
        # One agent was killed: Slurm may be about to start the job again, rightly.
        (("no-requeue", ""), ""),
    ],
)
def test_the_batch_script_of_a_pack_requeues_it_once_if_any_run_is_to_go_on(
    pack: tuple[ArrayDir, list[AttemptDir]], intents: tuple[str, str], expected: str
) -> None:
    array, attempts = pack
    for attempt, intent in zip(attempts, intents, strict=True):
        if intent:
            (attempt.path / intent).write_text("{}")
    assert pack_script(array, "true").stdout == expected
