"""Plans: canonical, hashed, without secrets; and the command that a worker gets."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.specs import spec

from slurmtrain.model.experiment.plan import LATER_KEYS, REDACTED, Plan, fill_command, make_plan

SPEC: dict[str, Any] = {"name": "x", "command": "python train.py", "params": {"lr": 0.1, "steps": 5}}


def planned(data: dict[str, Any], workdir: str = "/w", python: str = "/usr/bin/python3") -> tuple[Plan, dict[str, str]]:
    return make_plan(spec(**data), workdir=workdir, python=python, template=data)


def test_the_same_spec_has_the_same_hash_on_any_machine_and_another_content_another_one() -> None:
    local, _ = planned(SPEC, "/home/a", "/usr/bin/python3")
    remote, _ = planned(SPEC, "/scratch/b", "/opt/env/bin/python")
    assert local.hash == remote.hash
    assert local != remote
    for change in (
        {"params": {"lr": 0.2, "steps": 5}},
        {"name": "y"},
        {"resources": {"nodes": 2}},
        {"env": {"A": "1"}},
    ):
        assert planned({**SPEC, **change})[0].hash != local.hash


def test_newer_keys_do_not_change_the_hash_of_a_spec_that_does_not_use_them() -> None:
    # From the version before `code`, the first of them.
    assert planned(SPEC)[0].hash == "7eb6b1fccb5d1fbede3b6773d1dc749a380ae5b133578aba2051fb9cbff45f50"
    for path in LATER_KEYS:
        content = planned(SPEC)[0].content
        for key in path:
            assert key in content, f"{path} is no key of a spec"
            content = content[key]


def test_a_plan_has_nothing_left_to_fill_in_and_reads_back_from_its_json_as_itself() -> None:
    plan, _ = planned(
        {**SPEC, "resources": {"time": "1-2", "mem": "1.5GB", "gpus_per_node": 4}, "setup": ["a"],
         "checkpoint": {"every": {"minutes": 2}}}
    )  # fmt: skip
    assert (plan.spec.resources.procs_per_node, plan.spec.tracking.mlflow.experiment) == (4, "x")
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.hash == plan.hash


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("workdir", 1, "workdir"),
        ("python", None, "python"),
        ("template", [], "template"),
        ("schema", 99, "schema 99, but this version reads 1"),
        ("written", "x", "how numbers were written is not a list"),
        ("written", [["x"]], "does not say how a number was written"),
        ("spec.resources.nodes", 0, r"resources\.nodes: expected a whole number"),
    ],
)
def test_a_plan_that_is_damaged_or_of_a_newer_schema_is_refused(path: str, value: object, message: str) -> None:
    data = section = planned(SPEC)[0].to_json()
    *parents, key = path.split(".")
    for name in parents:
        section = section[name]
    section[key] = value
    with pytest.raises(ValueError, match=message):
        Plan.from_json(data)


def test_secrets_are_handed_over_and_stand_nowhere_in_the_plan() -> None:
    env = {"API_TOKEN": "hunter2", "DB_PASSWORD": "s3cret", "A": "1"}
    plan, secrets = planned({**SPEC, "env": env})
    assert secrets == {"API_TOKEN": "hunter2", "DB_PASSWORD": "s3cret"}
    text = json.dumps(plan.to_json())
    assert "hunter2" not in text
    assert "s3cret" not in text
    assert plan.spec.env == {"API_TOKEN": REDACTED, "DB_PASSWORD": REDACTED, "A": "1"}
    # One that was left out before is not taken for a value, and the hash is the same.
    again, secrets = planned({**SPEC, "env": {**env, "API_TOKEN": REDACTED}})
    assert secrets == {"DB_PASSWORD": "s3cret"}
    assert (again.spec.env, again.hash) == (plan.spec.env, plan.hash)


def test_a_template_keeps_the_way_to_a_secret() -> None:
    template = {**SPEC, "env": {"API_TOKEN": "${oc.env:MY_TOKEN}", "B_TOKEN": "hunter2"}}
    made = spec(**{**SPEC, "env": {"API_TOKEN": "hunter2"}})
    plan, _ = make_plan(made, workdir="/w", python="p", template=template)
    assert plan.template["env"] == {"API_TOKEN": "${oc.env:MY_TOKEN}", "B_TOKEN": REDACTED}


FACTS: dict[str, str | None] = {
    "resume_from": "/ckpt/5 a.pt", "resume_dir": "/ckpt", "resume_tag": "5 a.pt", "run_dir": "/runs/1",
    "checkpoint_dir": "/runs/1/checkpoints", "run_id": "1", "attempt": "2",
}  # fmt: skip


def argv(command: str, **changes: str | None) -> list[str]:
    plan, _ = planned({"name": "x", "command": command, "checkpoint": {"glob": "*.pt"}}, python="/opt/py")
    return fill_command(plan, {**FACTS, **changes})


@pytest.mark.parametrize(
    ("command", "words"),
    [
        # The word python is the one that was resolved, and only in front. A value with blanks stays one argument.
        ("python -m python", ["/opt/py", "-m", "python"]),
        ("python3 x.py", ["python3", "x.py"]),
        ("run --out {run_dir}/out --id={run_id}-{attempt} '$HOME' {unknown}",
         ["run", "--out", "/runs/1/out", "--id=1-2", "$HOME", "{unknown}"]),
        ("run --resume {resume_from} --dir '{checkpoint_dir} x'",
         ["run", "--resume", "/ckpt/5 a.pt", "--dir", "/runs/1/checkpoints x"]),
    ],
)  # fmt: skip
def test_placeholders_are_filled_in_without_a_shell(command: str, words: list[str]) -> None:
    assert argv(command) == words


@pytest.mark.parametrize(
    ("command", "left"),
    [
        ("run --resume {resume_from} -v", ["run", "-v"]),
        ("run --resume={resume_from} -v", ["run", "-v"]),
        ("run --a=b {resume_from}", ["run", "--a=b"]),
    ],
)  # fmt: skip
def test_at_a_first_start_the_argument_and_its_option_vanish(command: str, left: list[str]) -> None:
    assert argv(command, resume_from=None) == left


@pytest.mark.parametrize(
    ("command", "first", "later"),
    [
        ("run {resume_from?--init_from=resume} -v", ["run", "-v"], ["run", "--init_from=resume", "-v"]),
        ("run --a {resume_from?--continue}", ["run", "--a"], ["run", "--a", "--continue"]),
        ("run '{resume_from?two words}'", ["run"], ["run", "two words"]),
        ("run {resume_tag?--tag={resume_tag}}", ["run"], ["run", "--tag=5 a.pt"]),
        ("bash -c 'go {resume_from?--init_from=resume} | tee x'", ["bash", "-c", "go  | tee x"],
         ["bash", "-c", "go --init_from=resume | tee x"]),
        ("run {a?b} ''", ["run", "{a?b}", ""], ["run", "{a?b}", ""]),
    ],
)  # fmt: skip
def test_text_that_needs_a_checkpoint_is_there_only_with_one(command: str, first: list[str], later: list[str]) -> None:
    assert argv(command, resume_from=None, resume_tag=None, resume_dir=None) == first
    assert argv(command) == later


# --- who starts the ranks -------------------------------------------------------------------------------------------


def launched(command: str, **keys: object) -> Plan:
    return planned({"command": command, **keys})[0]


def test_in_a_plan_of_a_version_that_knew_no_launchers_slurmtrain_starts_the_ranks() -> None:
    data = launched("torchrun train.py {nodes}").to_json()
    del data["spec"]["launcher"]
    plan = Plan.from_json(data)
    assert not plan.spec.per_node
    assert fill_command(plan, FACTS) == ["torchrun", "train.py", "{nodes}"]
