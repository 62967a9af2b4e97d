"""Hostile names and texts arrive as they were written: from a spec through sbatch, shells and agents to trackers."""

from __future__ import annotations

import csv
import json
import os
import random
import shlex
import shutil
import sqlite3
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from helpers.cluster import ClusterSite
from helpers.hostile_names import NAMES, SEED, draw
from helpers.rare import rare
from helpers.wandb_files import synced_history
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from slurmtrain.model.experiment.values import check_param_name
from slurmtrain.plugins.wandb import refusal
from slurmtrain.slurm.parse import QUEUE_FIELDS
from slurmtrain.tracking.to_mlflow.sending import legal_name

_A_RUN = 25
PROBE = """
import json, os, sys
def whole(text):  # whatever the locale
    return os.fsencode(text).decode()
path = os.environ.get("SLURMTRAIN_PARAMS_FILE")
params = json.load(open(path)) if path else json.loads(os.environ["SLURMTRAIN_PARAMS"])
env = {k: whole(v) for k, v in os.environ.items() if k.startswith("HOSTILE_")}
with open(os.path.join(os.environ["SLURMTRAIN_RUN_DIR"], "probe.json"), "w") as file:
    json.dump({"argv": [*map(whole, sys.argv[1:])], "params": params, "env": env, "cwd": whole(os.getcwd())}, file)
with open(os.path.join(os.environ["SLURMTRAIN_CHECKPOINT_DIR"], "metrics.jsonl"), "w") as file:
    print(json.dumps({"step": 1, **{name: 1.5 for name in params["names"]}}), file=file)
"""

# What sbatch and shells take for their own in an option.
COMMENT = """a\\b 'c' "d" # $e %j \\\\"""


def can_be_param(name: str) -> bool:
    try:
        check_param_name(name)
    except ValueError:
        return False
    return True


def escaped(text: str) -> str:
    """As it is written where interpolations are evaluated."""
    return text.replace("${", "\\${")


@pytest.mark.parametrize("number", range(-(-NAMES // _A_RUN)))
def test_hostile_texts_arrive_as_they_were_written(site: ClusterSite, number: int) -> None:
    generator = random.Random(SEED + number)
    names = list(dict.fromkeys(draw(generator) for _ in range(min(_A_RUN, NAMES))))
    place = "".join(part for part in draw(generator) if part not in "%\\/\x7f\t\u2028") or "runs"
    root, workdir = site.path / f"r {place}", site.path / f"w {draw(generator).replace('/', '_')}"
    everywhere = number > 0
    workdir.mkdir()
    os.chown(workdir, site.person.uid, site.person.gid)
    (workdir / "probe.py").write_text(PROBE)
    # Braces of placeholders are the command's own.
    words = [name for name in names if "{run_id}" not in name]
    keys = {name: number for number, name in enumerate(names) if can_be_param(name)}
    env = {f"HOSTILE_{index}": name for index, name in enumerate(names)}
    spec = site.path / "hostile.yaml"
    spec.write_text(
        json.dumps(
            {
                "name": "hostile",
                "command": f"python probe.py {escaped(shlex.join(words))}",
                "workdir": escaped(str(workdir)),
                "params": {"names": list(map(escaped, names)), "long": ["x" * 40] * 5000, "keys": keys},
                "env": {name: escaped(text) for name, text in env.items()},
                "setup": [f"export HOSTILE_SETUP={shlex.quote(names[0])}"],
                "slurm": {"partition": "spot", "comment": COMMENT if number else escaped(names[0])},
                "tracking": {
                    "mlflow": {"experiment": escaped(names[-1] + "x")},
                    "metrics": {"file": "{checkpoint_dir}/metrics.jsonl"},
                    "csv": {"enabled": True},
                    "tensorboard": {"enabled": everywhere},
                    "wandb": {"enabled": everywhere, "mode": "offline"},
                },
                "resources": {"time": "00:05:00"},
            }
        )
    )
    variables = {"SLURMTRAIN_RUNS": str(root)}
    run_id = site.json("submit", str(spec), "--executor", "slurm", "--wait", env=variables)["runs"][0]["id"]
    arrived: dict[str, Any] = json.loads((root / run_id / "probe.json").read_text())
    assert arrived["argv"] == words
    assert arrived["params"]["names"] == names
    assert arrived["env"] == {**env, "HOSTILE_SETUP": names[0]}
    assert Path(arrived["cwd"]).name == workdir.name
    shown = site.json("show", run_id, env=variables)["run"]
    assert (shown["params"]["names"], shown["params"]["keys"]) == (names, keys)
    for command in (["status"], ["show", run_id], ["sync"], ["logs", run_id]):
        printed = site.call(*command, env=variables)
        assert max(map(len, printed.stdout.splitlines()), default=0) < 4000
        assert not set("\x7f\u202e") & set(printed.stdout)
    job = ["squeue", "--noheader", "--states=all", f"--jobs={shown['job_id']}", "--format=%k"]
    assert not number or site.cluster.slurm(*job).rstrip("\n") == COMMENT
    check_trackers(root, run_id, names, keys, everywhere=everywhere)
    # Nothing went anywhere else, such as to a place that a part of the path means.
    assert {each.name for each in site.path.iterdir()} >= {root.name, workdir.name}


def check_trackers(root: Path, run_id: str, names: Sequence[str], keys: Mapping[str, int], *, everywhere: bool) -> None:
    """Each metric and param is in each tracker, under a name of its own."""
    with (root / "csv" / f"{run_id}.csv").open(newline="", encoding="utf-8") as file:
        assert {*next(csv.reader(file))[3:]} == {*names}
    with closing(sqlite3.connect(root / "mlflow.db")) as store:
        metrics, params = (
            {key for (key,) in store.execute(f"SELECT key FROM {table}")} for table in ("latest_metrics", "params")
        )
        experiments = {name for (name,) in store.execute("SELECT name FROM experiments")}
    assert metrics >= {legal_name(name) for name in names}
    assert params >= {legal_name(f"keys.{name}") for name in keys}
    assert f"{names[-1]}x" in experiments
    if everywhere:
        events = [EventFileLoader(str(path)) for path in (root / "tensorboard" / run_id).glob("events*")]
        assert {each.tag for file in events for event in file.Load() for each in event.summary.value} == {*names}
        assert {*synced_history(root / "wandb")} == {name for name in names if not refusal(name)}


def own_job(site: ClusterSite, name: str) -> str:
    """The id of a job that the person submits without slurmtrain, which waits."""
    command = ["sbatch", "--parsable", "--hold", f"--job-name={name}", "--output=/dev/null", "--wrap=true"]
    submitted = subprocess.run(
        command, env=site.environment(), cwd=site.path, capture_output=True, text=True, check=True, **site.identity
    )
    return submitted.stdout.strip()


def forged_row(**cells: str) -> str:
    """A row of squeue."""
    return "".join(f"{cells.get(name, ''):<{width}}" for name, width in QUEUE_FIELDS)


def test_other_jobs_that_carry_the_id_of_a_run_are_not_its_own(site: ClusterSite) -> None:
    spec = site.path / "digits.yaml"
    spec.write_text("command: 'true'\nslurm: {partition: spot, begin: now+1hour}\nresources: {time: '00:05:00'}\n")
    run_id = site.submit(spec)
    job_id = site.job(run_id)
    name = f"digits-{run_id}"
    # As root: another account's.
    others = [site.cluster.slurm("sbatch", "--parsable", "--hold", f"--job-name={name}", "--wrap=true").strip()]
    ended = {"JobArrayID": job_id, "State": "COMPLETED", "RestartCnt": "0", "Name": name}
    for text in (
        f"eval-{name}", f"eval-{name}-more", f" {name}", f"{name}\tx", f"a|b'\"\\-{run_id}", f"{name}\n", f"x\n{name}",
        f"x\n{forged_row(**ended)}"[:250], f"x\n{job_id}|COMPLETED|0:0|1|2|3|4|node0|{name}",
    ):  # fmt: skip
        others.append(own_job(site, text))
    try:
        for command in (["status"], ["sync"], ["show", run_id]):
            site.call(*command)
        [run] = site.json("status", run_id)["runs"]
        assert (run["state"], run["job_id"]) == ("pending", job_id)
        # Nothing but names says then which jobs are the run's.
        shutil.rmtree(site.runs / run_id)
        site.call("cancel", run_id)
        assert site.cluster.state(job_id) in ("CANCELLED", "")
        assert {other: site.cluster.state(other) for other in others} == dict.fromkeys(others, "PENDING")
    finally:
        site.cluster.slurm("scancel", *others)


LOCALES = {
    "ascii": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "latin-1": {"LC_ALL": "de_DE.ISO-8859-1", "LOCPATH": "{locales}"},
    "missing": {"LC_ALL": "tr_TR", "PYTHONIOENCODING": "ascii"},
    "job": {},
}


@rare
def test_texts_come_through_whole_in_any_locale(site: ClusterSite) -> None:
    locales, place = site.path / "locales", site.path / "wörk 日本"
    for path in (locales, place):
        path.mkdir()
        os.chown(path, site.person.uid, site.person.gid)
    subprocess.run(["localedef", "-i", "de_DE", "-f", "ISO-8859-1", locales / "de_DE.ISO-8859-1"], capture_output=True)
    (place / "prøbe.py").write_text(PROBE + 'sys.stdout.buffer.write("grüße 日本\\n".encode())\n', encoding="utf-8")
    root = site.path / "rüns 日本"
    runs = {}
    for name, variables in LOCALES.items():
        spec = {
            "name": name,
            "command": "python prøbe.py 'größe 日本'",
            "params": {"names": ["日本 ü"], "größe": 1},
            "env": {"HOSTILE_ENV": "grüße 日本"},
            "setup": ["export LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0"] if name == "job" else [],
            "setup_node": ["export HOSTILE_NODE='knøten 日本'", "echo nöde"],
            "slurm": {"partition": "spot", "comment": "größe"},
            "resources": {"time": "00:05:00"},
            "tracking": {"mlflow": {"enabled": False}, "metrics": {"file": "{checkpoint_dir}/metrics.jsonl"}},
        }
        (place / f"{name}-é.yaml").write_text(json.dumps(spec, ensure_ascii=False), encoding="utf-8")
        env = {key: value.format(locales=locales) for key, value in variables.items()}
        site.call("--runs", str(root), "submit", f"{name}-é.yaml", "--executor", "slurm", cwd=place, env=env)
        runs[name] = env
    utf8 = {"LC_ALL": "C.UTF-8", "SLURMTRAIN_RUNS": str(root)}
    site.call("wait", *runs, env=utf8)
    for name, env in runs.items():
        shown = site.json("show", name, env=utf8)["run"]
        assert (shown["state"], shown["params"]) == ("completed", {"names": ["日本 ü"], "größe": 1})
        arrived = json.loads((root / shown["id"] / "probe.json").read_text())
        assert arrived["argv"] == ["größe 日本"]
        assert arrived["env"] == {"HOSTILE_ENV": "grüße 日本", "HOSTILE_NODE": "knøten 日本"}
        assert arrived["params"]["names"] == ["日本 ü"]
        assert shown["metrics"] == {"日本 ü": 1.5}
        logs = site.call("logs", name, env=utf8).stdout
        assert "grüße 日本" in logs
        assert "nöde" in logs
        # Also in the locale of the shell, as far as it has the characters.
        for command in ("status", "show", "logs", "doctor"):
            site.call("--runs", str(root), command, *([] if command == "status" else [name]), env=env)
