"""Runs from their submission to their end, as a person sees them."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.site import ONE_PROCESS, SCRIPTS, Site, until

LONG = {"steps": 100_000, "step_ms": 10}
TWO = {"nodes": 1, "procs_per_node": 2}
# For what is about the end of an attempt: nothing follows it by itself.
ONCE = {"enabled": False}


@pytest.fixture(scope="module")
def completed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Site, dict[str, Any]]:
    """A run of four processes that has completed, and its place, for those who only look at it."""
    site = Site(tmp_path_factory.mktemp("completed"))
    spec = site.light(resources={"nodes": 2, "procs_per_node": 2}, params={"steps": 5})
    [run] = site.json("submit", str(spec), "--executor", "local", "--wait")["runs"]
    return site, run


def test_a_run_over_two_nodes_completes_and_each_rank_has_its_log(completed: tuple[Site, dict[str, Any]]) -> None:
    site, run = completed
    assert (run["state"], run["step"], run["total_steps"], run["lost_steps"]) == ("completed", 5, 5, 0)
    assert set(run["metrics"]) == {"loss"}
    assert (run["checkpoint"]["step"], run["checkpoint"]["complete"]) == (5, True)
    logs = sorted(Path(run["dir"]).glob("attempts/*/logs/rank-*.log"))
    assert [path.name for path in logs] == [f"rank-{rank}.log" for rank in range(4)]
    weights = {line.split()[1] for path in logs for line in path.read_text().splitlines() if line[:7] == "weights"}
    assert len(weights) == 1
    [attempt] = site.show(run["id"])["attempts"]
    assert len(attempt["nodes"]) == len(set(attempt["nodes"])) == 2
    assert attempt["master_addr"] == "127.0.0.1"
    assert set(attempt["interfaces"].values()) == {"lo"}


def test_a_rank_imports_what_it_needs_of_torch_at_its_start_and_nothing_that_only_others_need(tmp_path: Path) -> None:
    site = Site(tmp_path)
    spec = site.spec(script="imports.py", resources=TWO, checkpoint={"every": {"steps": 2}})
    [run] = site.json("submit", str(spec), "--executor", "local", "--wait")["runs"]
    for rank in range(2):
        [log] = Path(run["dir"]).glob(f"attempts/*/logs/rank-{rank}.log")
        imported = json.loads(log.read_text().splitlines()[-1])
        assert {"torch._dynamo", "torch.distributed.checkpoint"} <= set(imported["start"])
        # Neither the first save nor anything else in training waits for an import.
        late = ("torch._dynamo", "torch._inductor", "torch.distributed", "sympy", "slurmtrain")
        assert [name for name in imported["later"] if name.startswith(late)] == []
        others = {"click", "mlflow", "omegaconf", "psutil", "pydantic", "sqlalchemy", "submitit", "yaml"}
        assert not {name.partition(".")[0] for name in imported["start"]} & others
        assert not [
            name for name in imported["start"] if name.startswith(("slurmtrain.model.run.fold", "slurmtrain.ops"))
        ]


def test_what_a_run_leaves_behind_is_for_its_owner_alone(completed: tuple[Site, dict[str, Any]]) -> None:
    site, run = completed
    for path in [Path(run["dir"]), *Path(run["dir"]).rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        # The copy of the code has the modes that the code has.
        if not {"submitit", "code"} & set(path.relative_to(run["dir"]).parts):
            assert mode == (0o700 if path.is_dir() else 0o600), f"{path}: {mode:o}"
    assert stat.S_IMODE((site.runs / "registry.db").stat().st_mode) == 0o600


# MLflow's own store cannot be made in a directory with an apostrophe in its name.
@pytest.mark.parametrize(("name", "tracked"), [('it\'s a "$HOME" & 100? #1;', False), ("a $b & 100 #1", True)])
def test_a_runs_root_with_an_odd_name_works_like_any_other(tmp_path: Path, name: str, tracked: bool) -> None:
    odd = tmp_path / name
    odd.mkdir()
    site = Site(odd)
    spec = site.light(params={"steps": 2}, setup=["export A=1"], tracking={"mlflow": {"enabled": tracked}})
    [run] = site.json("submit", str(spec), "--executor", "local", "--wait")["runs"]
    assert (run["state"], run["dir"]) == ("completed", str(site.runs / run["id"]))
    assert bool(run["mlflow_run_id"]) == tracked
    assert "weights" in site.call("logs", run["id"]).stdout


def test_the_run_lives_on_when_the_terminal_closes(site: Site) -> None:
    """The whole session that the submission belonged to gets SIGHUP and SIGKILL, as when a terminal goes away."""
    shell = subprocess.Popen(
        [sys.executable, "-m", "slurmtrain", "submit", str(site.light(params=LONG)), "--executor", "local", "--wait"],
        cwd=site.path,
        env=site.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    [run_dir] = until(lambda: list(site.runs.glob("[!.]*/plan.json")), "the run")
    run_id = run_dir.parent.name
    until(lambda: site.step(run_id) >= 1, "the first step")
    for number in (signal.SIGHUP, signal.SIGKILL):
        for process in psutil.process_iter():
            if _session(process.pid) == shell.pid:
                process.send_signal(number)
    shell.wait()
    before = site.step(run_id)
    until(lambda: site.step(run_id) > before + 3, "more steps")
    assert site.status(run_id)["state"] == "running"


def _session(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[3])
    except OSError:
        return None


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_worker_that_crashes_ends_the_others_and_is_named_with_its_last_lines(site: Site, nodes: int) -> None:
    spec = site.light(
        resources={"nodes": nodes, "procs_per_node": 3 - nodes},
        params={"steps": 1000, "step_ms": 5, "crash_rank": 1, "crash_step": 4},
        requeue=ONCE,
    )
    run_id = site.submit(spec, "--wait", code=1)
    run = site.show(run_id)

    assert run["state"] == "failed"
    assert run["reason"].startswith("ValueError: the loss went up to")
    [attempt] = run["attempts"]
    assert (attempt["cause"], attempt["restarts"]) == ("crash", [])
    first = attempt["failures"][0]
    assert (first["rank"], first["exit_code"]) == (1, 1)
    assert any("ValueError: the loss went up" in line for line in first["last_lines"])
    ends = [event["t"] for event in _events(site, run_id) if event["kind"] == "end"]
    assert max(ends) - first["at"] < 15
    assert "hunter2" not in "".join(path.read_text() for path in (site.runs / run_id).rglob("*.jsonl"))
    until(lambda: not site.processes(run_id), "the end of all processes")


def _events(site: Site, run_id: str) -> list[dict[str, Any]]:
    lines = [line for path in (site.runs / run_id).rglob("*.jsonl") for line in path.read_text().split("\n")[:-1]]
    return [event for event in map(json.loads, lines) if "kind" in event]


def test_a_crash_that_comes_again_at_the_same_step_ends_the_run_after_one_restart_in_place(site: Site) -> None:
    spec = site.light(params={"steps": 9, "crash_rank": 0, "crash_step": 4}, checkpoint={"every": {"steps": 2}})
    run_id = site.submit(spec, "--wait", code=1)
    run = site.show(run_id)
    [attempt] = run["attempts"]
    [restart] = attempt["restarts"]
    assert (run["state"], restart["cause"], restart["round"]) == ("failed", "crash", 1)
    assert "it failed twice at step 4 in the same way" in run["reason"]
    restored = [event["step"] for event in _events(site, run_id) if event["kind"] == "restored"]
    assert restored == [4]


def test_a_killed_worker_is_named_with_its_signal_and_all_start_again_where_they_were(site: Site) -> None:
    run_id = site.submit(site.light(params=LONG, resources=TWO))
    until(lambda: site.step(run_id) >= 1, "the first step")
    # Not by their environment, which the writers of checkpoints inherit.
    [workers] = [event for event in _events(site, run_id) if event["kind"] == "workers"]
    os.kill(workers["processes"]["1"]["pid"], signal.SIGKILL)
    [restart] = until(lambda: site.show(run_id)["attempts"][0]["restarts"], "the restart")
    assert (restart["cause"], restart["members"], restart["lost"]) == ("crash", [0], [])
    assert "rank 1 was killed by SIGKILL" in restart["why"]
    until(lambda: list((site.runs / run_id).glob("attempts/*/rank-0.1.jsonl")), "ranks of the second round")
    run = site.show(run_id)
    assert (run["state"], len(run["attempts"])) == ("running", 1)


def test_no_thread_of_the_sessions_groups_outlives_it_to_meet_the_interpreters_end(
    completed: tuple[Site, dict[str, Any]],
) -> None:
    logs = [path.read_text() for path in Path(completed[1]["dir"]).glob("attempts/*/logs/rank-*.log")]
    assert ["gloo threads: 0" in log for log in logs] == [True] * 4, logs


def test_a_command_that_does_not_exist_is_named(site: Site) -> None:
    spec = site.path / "absent.yaml"
    # Where setup has lines, programs are not looked for before.
    spec.write_text("command: no-such-program --flag\nsetup: [':']\ntracking: {mlflow: {enabled: false}}\n")
    run_id = site.submit(spec, "--wait", code=1)
    assert "cannot run 'no-such-program'" in site.status(run_id)["reason"]


def test_a_port_that_was_taken_before_rank_0_could_listen_is_named(site: Site) -> None:
    (site.path / "taken.py").write_text(
        "import os, socket, slurmtrain\n"
        "if os.environ['RANK'] == '0':\n"
        "    taken = socket.create_server((os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])))\n"
        "with slurmtrain.session():\n"
        "    pass\n"
    )
    spec = site.spec("taken", command=f"python {site.path / 'taken.py'}", requeue={"enabled": False})
    run_id = site.submit(spec, "--wait", code=1)
    assert re.search(
        r"rank 0 cannot listen for the other ranks at port \d+ of 127\.0\.0\.1: Address already in use",
        site.status(run_id)["reason"],
    )
    assert "the port is in use" in site.call("doctor", run_id, code=None).stdout


def test_arguments_arrive_as_they_were_written(site: Site) -> None:
    words = ["a b", "$HOME", "$$", "${local_rank}", "it's", '"', "*", ";", "{json: 1}", "ü"]
    spec = site.path / "words.yaml"
    command = shlex.join(["python", "-c", "import sys; print(sys.argv[1:])", *words])
    spec.write_text(json.dumps({"command": command.replace("${", "\\${"), "tracking": {"mlflow": {"enabled": False}}}))
    run_id = site.submit(spec, "--wait")
    assert site.call("logs", run_id, "--rank", "0").stdout == f"{words}\n"


def test_cancel_from_another_terminal_saves_and_ends_the_run(site: Site) -> None:
    run_id = site.submit(site.light(params=LONG, resources=TWO))
    until(lambda: site.step(run_id) >= 3, "a few steps")
    site.call("cancel", run_id)
    run = site.status(run_id)
    assert (run["state"], run["lost_steps"]) == ("cancelled", 0)
    assert run["checkpoint"]["step"] == run["step"]
    assert not site.processes(run_id)
    assert "had ended already" in site.call("cancel", run_id).stderr


def test_cancel_force_kills_what_ignores_being_asked(site: Site) -> None:
    spec = site.path / "deaf.yaml"
    script = site.path / "deaf.py"
    script.write_text(
        "import signal, threading\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('deaf', flush=True)\n"
        "while True: threading.Event().wait(1)\n"
    )
    spec.write_text(f"command: python {script}\ntracking: {{mlflow: {{enabled: false}}}}\n")
    run_id = site.submit(spec)
    until(lambda: "deaf" in site.call("logs", run_id).stdout, "the script")
    site.call("cancel", "--force", run_id)
    assert site.status(run_id)["state"] == "cancelled"
    assert not site.processes(run_id)


def test_a_run_stops_before_its_time_limit_and_can_go_on_with_another(site: Site) -> None:
    spec = site.light(
        params={"steps": 60, "step_ms": 1000},
        resources={"nodes": 1, "procs_per_node": 2, "time": "00:00:40"},
        requeue={"lead": "25s"},
    )
    run_id = site.submit(spec)
    site.until_state(run_id, "requeued")
    run = site.show(run_id)
    assert run["attempts"][0]["cause"] == "timeout"
    assert "'slurmtrain sync' or 'watch' starts it again" in run["reason"]
    assert (run["lost_steps"], run["checkpoint"]["step"]) == (0, run["step"])
    # 25 s before the limit, and not 4, which is a tenth of it.
    assert run["step"] <= 16
    [resumed] = site.json("resume", run_id, "resources.time=01:00:00", "params.step_ms=0", "--wait")["runs"]
    assert (resumed["state"], resumed["step"]) == ("completed", 60)
    assert site.show(run_id)["attempts"][1]["overrides"] == ["resources.time=01:00:00", "params.step_ms=0"]


def test_resume_with_more_steps_continues_after_completion(site: Site) -> None:
    run_id = site.submit(site.light(params={"steps": 4}), "--wait")
    refused = site.call("resume", run_id, code=2)
    assert "has completed" in refused.stderr
    [resumed] = site.json("resume", run_id, "params.steps=9", "--wait")["runs"]
    assert (resumed["state"], resumed["step"], resumed["attempt"]) == ("completed", 9, 2)


def test_resume_of_a_run_without_a_checkpoint_begins_again(site: Site) -> None:
    spec = site.light(params={"steps": 9, "crash_rank": 0, "crash_step": 2}, requeue=ONCE)
    run_id = site.submit(spec, "--wait", code=1)
    resumed = site.call("resume", run_id, "params.crash_rank=-1", "--wait", "--json")
    assert f"warning: run {run_id} has no checkpoint, so it starts from the beginning" in resumed.stderr
    [again] = json.loads(resumed.stdout)["runs"]
    assert (again["state"], again["step"], again["lost_steps"]) == ("completed", 9, 2)


def test_a_script_of_ones_own_gets_the_facts_and_its_newest_checkpoint(site: Site) -> None:
    spec = site.path / "own.yaml"
    spec.write_text(
        f"command: python {SCRIPTS / 'plain.py'} {{checkpoint_dir}} 50 ${{params.ms}} --resume {{resume_from}}\n"
        "params: {ms: 30}\n"
        'checkpoint: {glob: "{checkpoint_dir}/ckpt-*"}\n'
        "tracking: {mlflow: {enabled: false}}\n"
    )
    run_id = site.submit(spec)
    checkpoints = site.runs / run_id / "checkpoints"
    until(lambda: (checkpoints / "ckpt-15.txt").exists(), "checkpoints")
    site.signal_all(run_id, signal.SIGKILL)
    kept = max(int(path.stem.split("-")[1]) for path in checkpoints.glob("ckpt-*.txt"))

    first = site.call("logs", run_id).stdout
    assert "from the start" in first
    assert f"RUN_ID={run_id}" in first
    site.call("resume", run_id, "params.ms=0", "--wait")
    second = site.call("logs", run_id, "--rank", "0").stdout
    assert f"resumed from {checkpoints / f'ckpt-{kept}.txt'}" in second
    assert f"RESUME_FROM={checkpoints / f'ckpt-{kept}.txt'}" in second
    assert "ATTEMPT=2" in second
    assert 'PARAMS={"ms": 0}' in second
    run = site.status(run_id)
    assert (run["state"], run["checkpoint"]["step"]) == ("completed", 50)
    assert (run["params"], run["sweep"], run["cause"]) == ({"ms": 0}, None, "completed")


def test_as_many_runs_of_a_local_sweep_as_may_run_at_once_each_on_gpus_of_its_own(site: Site) -> None:
    keys: dict[str, Any] = {
        "command": 'sh -c \'trap "" TERM; echo gpu $CUDA_VISIBLE_DEVICES; '
        "while [ ! -e go-${params.a} ]; do sleep 0.1; done'",
        "resources": {**ONE_PROCESS, "gpus_per_node": 1},
        "preflight": {"gpu": False},
        "requeue": {"enabled": False},
        # Its script looks for a file that is made later, beside the code.
        "code": "none",
    }
    spec = site.commanding(params={"a": 0}, sweep={"params.a": [1, 2, 3, 4], "parallel": 2}, **keys)
    gpus = {"CUDA_VISIBLE_DEVICES": "4,5,6"}
    runs = site.json("submit", str(spec), "--executor", "local", env=gpus)["runs"]
    ids = [run["id"] for run in runs]
    for run_id in ids[:2]:
        site.wait_for_lines(run_id)
    assert sorted(line for run_id in ids[:2] for line in site.printed(run_id)) == ["gpu 4", "gpu 5"]
    until(lambda: "waits for its turn" in site.status(ids[2])["reason"], "the third run to wait")
    site.call("cancel", ids[2])
    # An agent that is killed gives its slot back, once nothing that it has started trains or saves.
    for process in site.processes(ids[0]):
        with suppress(psutil.NoSuchProcess):
            if any(ids[0] in word for word in process.cmdline()):
                process.kill()
    # Meanwhile a run of no sweep takes the GPU that is left.
    alone = site.submit(site.commanding(name="alone", params={"a": 5}, **keys), env=gpus)
    site.wait_for_lines(alone)
    assert site.printed(alone) == ["gpu 6"]
    assert "waits for its turn" in site.status(ids[3])["reason"]
    (site.path / "go-1").touch()
    site.wait_for_lines(ids[3])
    [used] = site.printed(ids[3])
    assert used in {"gpu 4", "gpu 5"} - set(site.printed(ids[1]))
    for number in (2, 4, 5):
        (site.path / f"go-{number}").touch()
    site.call("wait", *ids, alone, code=None)
    states = [site.status(run_id)["state"] for run_id in (*ids, alone)]
    assert states == ["lost", "completed", "cancelled", "completed", "completed"]


def test_the_runs_of_a_sweep_go_one_after_the_other_on_this_machine(site: Site) -> None:
    spec = site.commanding("echo ${params.steps} ${params.step_ms}", params={"steps": 3, "step_ms": 0},
                           sweep={"params.steps": [3, 4]})  # fmt: skip
    runs = site.json("submit", str(spec), "--executor", "local", "--sweep", "params.step_ms=0,1", "--wait")["runs"]
    assert [run["state"] for run in runs] == ["completed"] * 4
    assert [site.printed(run["id"]) for run in runs] == [["3 0"], ["3 1"], ["4 0"], ["4 1"]]
    for earlier, later in itertools.pairwise(runs):
        ended = site.show(earlier["id"])["ended_at"]
        workers = [event for event in _events(site, later["id"]) if event["kind"] == "rendezvous"]
        assert site.show(later["id"])["attempts"][0]["started_at"] is not None
        assert _iso(float(str(workers[0]["t"]))) >= ended
    assert len({run["plan_hash"] for run in runs}) == 4
    [sweep] = {run["sweep"] for run in runs}
    assert site.json("status", sweep)["runs"] == site.json("status")["runs"]
    assert [run["params"] for run in runs][1] == {"steps": 3, "step_ms": 1}
    # What real agents and ranks leave is all that stays or goes.
    site.call("delete", sweep, "-y")
    files = [path for run in runs for path in Path(run["dir"]).rglob("*") if path.is_file()]
    # What each node had installed is named by its hash.
    left = {path.name for path in files if path.parent.name != "environments"}
    kept = {".lock", "spec.yaml", "environment.txt"}
    assert {name for name in left if not name.endswith((".jsonl", ".json"))} == kept
    before = site.json("status")["runs"]
    site.call("registry", "rebuild")
    assert site.json("status")["runs"] == before


def _iso(seconds: float) -> str:
    from slurmtrain.model.query.fields import iso

    return str(iso(seconds))


def test_secrets_reach_the_script_and_no_file(site: Site) -> None:
    spec = site.light(params={"steps": 2}, env={"MY_TOKEN": "tok-4711-secret", "PRINT_LENGTH": "1"})
    run_id = site.submit(spec, "--wait")
    assert str(len("tok-4711-secret")) in site.call("logs", run_id, "--rank", "0").stdout
    holders = [
        path for path in [*(site.runs / run_id).rglob("*"), site.runs / "registry.db"]
        if path.is_file() and not path.is_symlink() and b"tok-4711-secret" in path.read_bytes()
    ]  # fmt: skip
    assert holders == []
    refused = site.call("resume", run_id, "params.steps=3", code=2)
    assert "MY_TOKEN" in refused.stderr
    site.call("resume", run_id, "params.steps=3", "--wait", env={"MY_TOKEN": "another"})


def test_logs_follow_a_run_to_its_end_with_rank_and_attempt(site: Site) -> None:
    count = "import time; [print(number, flush=True) or time.sleep(0.02) for number in range(30)]"
    run_id = site.submit(site.commanding(f'python -c "{count}"', resources=TWO))
    followed = site.call("logs", "-f", run_id)
    assert "[1/rank 0] 29" in followed.stdout
    assert "[1/rank 1] 29" in followed.stdout
    assert site.call("logs", run_id, "--rank", "7", code=2).stderr.count("no log of rank 7") == 1
    assert "no attempt 3" in site.call("logs", run_id, "--attempt", "3", code=2).stderr


def test_setup_lines_run_before_the_tasks_and_their_exports_arrive(site: Site, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    spec = site.path / "setup.yaml"
    spec.write_text(
        "command: python -c \"import os; print('found', os.environ['FROM_SETUP'])\"\n"
        f"setup: ['export FROM_SETUP=${{HOME:+yes}}', 'cd {elsewhere}']\n"
        "tracking: {mlflow: {enabled: false}}\n"
    )
    # What lies in the directory to which setup goes is not imported in place of what agents need.
    (elsewhere / "submitit.py").write_text("raise SystemExit('this is another module')\n")
    run_id = site.submit(spec, "--wait")
    assert "found yes" in site.call("logs", run_id).stdout


_THREADS_AT_EXIT = """
import atexit, runpy, sys
from pathlib import Path
atexit.register(lambda: print(*sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))))
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_the_same_script_trains_without_any_job_and_leaves_no_thread_of_gloo(site: Site) -> None:
    completed = subprocess.run(
        # Threads of gloo that are left at the exit can abort the process there: "terminate called without an active
        # exception", in one exit of hundreds.
        [sys.executable, "-c", _THREADS_AT_EXIT, str(SCRIPTS / "train.py")],
        cwd=site.path,
        env=site.environment(),
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith("weights ")
    assert "gloo" not in completed.stdout
    assert list(site.path.iterdir()) == []
