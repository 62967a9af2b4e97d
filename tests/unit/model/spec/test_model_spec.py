"""The schema of a spec: what is read, what is refused, and that what is written reads back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.spec.checkpoint.every import EveryAuto
from slurmtrain.model.spec.checkpoint.section import VERIFY, BestSpec, KeepSpec
from slurmtrain.model.spec.kinds import HOMES, default_of
from slurmtrain.model.spec.names import is_secret_param
from slurmtrain.model.spec.other_names import OTHER_NAMES
from slurmtrain.model.spec.resources.section import ResourcesSpec
from slurmtrain.model.spec.sbatch import PASSED
from slurmtrain.model.spec.spec import (
    NETWORK_PROFILES,
    RequeueSpec,
    Spec,
    read_requeue,
    read_spec,
    walk_keys,
    write_requeue,
    write_spec,
)
from slurmtrain.model.spec.values import Nodes


def mistakes_of(data: object) -> list[tuple[str, str]]:
    mistakes: list[tuple[str, str]] = []
    read_spec(data, lambda at, message: mistakes.append((".".join(at), message)))
    return mistakes


def good(data: object) -> Spec:
    mistakes: list[tuple[tuple[str, ...], str]] = []
    spec = read_spec(data, lambda at, message: mistakes.append((at, message)))
    assert mistakes == []
    return spec


def only_mistake(**keys: object) -> tuple[str, str]:
    [mistake] = mistakes_of({"name": "x", "command": "true", **keys})
    return mistake


# --- defaults and round trip ------------------------------------------------------------------------------------


def test_a_spec_of_name_and_command_has_every_default() -> None:
    spec = good({"name": "x", "command": "python train.py"})
    assert (spec.resources.nodes, spec.resources.elastic) == (Nodes(1, 1), False)
    assert spec.resources.local_world_size == 1
    assert spec.checkpoint.every == EveryAuto()
    assert spec.requeue == RequeueSpec()
    assert (spec.requeue.enabled, spec.requeue.max_failures, spec.requeue.signal) == (True, 3, "SIGTERM")
    assert (spec.params, spec.env, spec.slurm, spec.setup) == ({}, {}, {}, ())


def test_a_spec_without_a_command_is_refused() -> None:
    assert mistakes_of({"name": "x"}) == [("command", "this key is required")]


names = st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,8}", fullmatch=True)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=10)
)
parameters = st.dictionaries(
    names.filter(lambda name: not is_secret_param(name)),
    st.deferred(lambda: scalars | st.lists(scalars, max_size=3) | parameters),
    max_size=3,
)
everies = st.one_of(
    st.just("auto"),
    st.fixed_dictionaries({"steps": st.integers(1, 10**6)}),
    st.fixed_dictionaries({"minutes": st.floats(0.01, 1e6) | st.integers(1, 1000)}),
)
bests = st.fixed_dictionaries(
    {"metric": names}, optional={"mode": st.sampled_from(["min", "max"]), "n": st.integers(1, 9)}
)
keeps = st.integers(1, 9) | st.fixed_dictionaries(
    {},
    optional={
        "last": st.integers(1, 9),
        "every_steps": st.none() | st.integers(1, 10**6),
        "best": st.none() | bests,
    },
)
lines = st.text(max_size=20).filter(lambda text: "\0" not in text and "\r" not in text)
options = st.sampled_from(sorted(PASSED - {"mem-per-cpu", "mem-per-gpu"}))
ranges = st.tuples(st.integers(1, 9), st.integers(0, 9)).map(lambda two: {"min": two[0], "max": sum(two)})
requeues = st.fixed_dictionaries(
    {},
    optional={
        "enabled": st.booleans(),
        "max_failures": st.integers(0, 9),
        "backoff_s": st.floats(0, 1e6),
        "hang_after": st.none() | st.integers(1, 10**6),
        "signal": st.sampled_from(["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT"]),
    },
)
spec_data = st.fixed_dictionaries(
    {"name": names, "command": st.sampled_from(["python train.py --lr 0.1", "echo 'a b' \"c\"", "./run.sh"])},
    optional={
        "workdir": st.none() | names,
        "params": parameters,
        "resources": st.fixed_dictionaries(
            {},
            optional={
                "nodes": st.integers(1, 1000) | ranges,
                "spares": st.integers(0, 9),
                "gpus_per_node": st.integers(0, 8),
                "cpus_per_proc": st.integers(1, 64),
                "mem": st.none() | st.integers(1, 10**6).map(lambda mib: f"{mib}MB"),
                "time": st.none() | st.integers(1, 59) | st.from_regex(r"[1-9]-1[0-9]", fullmatch=True),
            },
        ),
        "slurm": st.dictionaries(options, st.none() | st.booleans() | st.integers() | names, max_size=3),
        "network": st.fixed_dictionaries(
            {}, optional={"interface": names, "profile": st.none() | st.sampled_from(NETWORK_PROFILES)}
        ),
        "preflight": st.fixed_dictionaries(
            {"clock": st.fixed_dictionaries({"warn_ms": st.floats(0, 10), "fail_ms": st.integers(10, 100)})}
        ),
        "checkpoint": st.fixed_dictionaries(
            {"every": everies, "keep": keeps},
            optional={
                "verify": st.sampled_from(VERIFY),
                "quota": st.none() | st.integers(1, 10**6).map(lambda mib: f"{mib}M"),
            },
        ),
        "requeue": requeues,
        "tracking": st.fixed_dictionaries({"mlflow": st.fixed_dictionaries({"experiment": st.none() | names})}),
        "env": st.dictionaries(
            names, st.text(max_size=8).filter(lambda text: "\0" not in text) | st.integers(), max_size=3
        ),
        "setup": st.lists(lines, max_size=3),
    },
)


@given(spec_data)
def test_a_written_spec_reads_back_as_itself_even_through_json(data: dict[str, Any]) -> None:
    spec = good(data)
    plain = write_spec(spec)
    assert good(plain) == spec
    assert good(json.loads(json.dumps(plain))) == spec
    assert write_spec(good(plain)) == plain


def test_a_written_spec_has_every_key_of_the_schema() -> None:
    keep = {"best": {"metric": "loss"}}
    tracking = {"metrics": {"file": "metrics.csv"}}
    strategy = {"mesh": {"tp": 1}, "activation_checkpointing": True}
    oom = {"at_most": "2GB"}
    more = {"resources": {"mem": "1GB"}, "requeue": {"oom": oom}, "start_from": "a", "strategy": strategy}
    plain = write_spec(
        good({"name": "x", "command": "true", "checkpoint": {"keep": keep}, "tracking": tracking, **more})
    )
    for path, _ in walk_keys():
        inside: Any = plain
        for key in path:
            assert key in inside, path
            inside = inside[key]


def test_every_key_has_a_line_for_the_reference_and_a_default() -> None:
    for path, field in walk_keys():
        assert field.metadata["doc"].endswith("."), path
        assert field.metadata["kind"].text, path
        default_of(field)
        assert path[-1] in HOMES


def test_an_unsafe_name_is_refused_at_its_key() -> None:
    assert only_mistake(name="a/b")[0] == "name"


def test_a_name_of_only_spaces_is_refused() -> None:
    assert only_mistake(name="   ") == ("name", "expected name, found a blank text")


# --- keys and values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "key", "near"),
    [
        ({"resourses": {}}, "resourses", "'resources'"),
        ({"resources": {"node": 2}}, "resources.node", "'nodes'"),
        ({"preflight": {"clock": {"warn": 1}}}, "preflight.clock.warn", "'warn_ms'"),
        ({"tracking": {"mlflow": {"url": "x"}}}, "tracking.mlflow.url", "'uri'"),
        ({"resources": {"gpu": 2}}, "resources.gpu", "'gpus_per_node'"),
        ({"preflight": {"gpus": "off"}}, "preflight.gpus", "'gpu'"),
        ({"checkpoint": {"keep": {"lst": 5}}}, "checkpoint.keep.lst", "'last'"),
        ({"checkpoint": {"keep": {"best": {"metric": "a", "mod": "max"}}}}, "checkpoint.keep.best.mod", "'mode'"),
        ({"checkpoint": {"keep": {"best": {"metric": "a", "mode": "mx"}}}}, "checkpoint.keep.best.mode", "'max'"),
    ],
)
def test_an_unknown_key_is_refused_at_any_depth_with_a_suggestion(data: dict[str, Any], key: str, near: str) -> None:
    at, message = only_mistake(**data)
    assert at == key
    assert f"did you mean {near}?" in message


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, "7", True, [1]])
def test_a_seed_is_a_number_that_all_libraries_take(seed: object) -> None:
    at, message = only_mistake(seed=seed)
    assert at == "seed"
    assert "expected a whole number" in message


def test_deterministic_is_true_or_false() -> None:
    assert only_mistake(deterministic="yes")[1].startswith("expected true or false")


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        ({"nodes": 2}, "it belongs under 'resources'"),
        ({"resources": {"command": "x"}}, "it belongs at the top level"),
        ({"partition": "spot"}, "it belongs under 'slurm'"),
        ({"resources": {"mail_type": "END"}}, "it belongs under 'slurm'"),
        ({"gpus": 2}, "did you mean 'resources.gpus_per_node'?"),
        ({"queue": "spot"}, "did you mean 'slurm.partition'?"),
        ({"checkpoint": {"interval": 5}}, "the keys here are every, format, glob, keep, quota, step, verify"),
    ],
)
def test_a_key_in_the_wrong_section_gets_a_hint(data: dict[str, Any], hint: str) -> None:
    assert hint in only_mistake(**data)[1]


@pytest.mark.parametrize("name", ["comand", "cmd", "script", "run"])
def test_a_command_under_another_name_is_one_mistake(name: str) -> None:
    assert mistakes_of({"name": "x", name: "true"}) == [(name, "unknown key; did you mean 'command'?")]


def test_a_required_key_is_missed_beside_an_unknown_one_that_is_no_slip_of_it() -> None:
    assert [key for key, _ in mistakes_of({"name": "x", "nodes": 2})] == ["nodes", "command"]


def test_what_other_programs_call_a_key_leads_to_a_key_that_there_is() -> None:
    keys = {*(path for path, _ in walk_keys()), ("sweep",), ("slurm", "partition")}
    assert {*OTHER_NAMES.values()} <= keys
    assert not {(*path[:-1], name) for name, path in OTHER_NAMES.items()} & keys


@pytest.mark.parametrize("key", ["requeue", "tracking.mlflow"])
def test_a_section_with_a_switch_that_is_switched_is_told_how(key: str) -> None:
    section, _, inner = key.partition(".")
    assert only_mistake(**{section: {inner: False} if inner else False})[1].endswith("; write {enabled: false}")


def test_a_command_in_a_list_is_told_how_to_write_it() -> None:
    [(_, message)] = mistakes_of({"name": "x", "command": ["python", "train.py"]})
    assert message.endswith("; write python train.py")


@pytest.mark.parametrize(
    ("data", "key", "message"),
    [
        ({"resources": {"nodes": 0}}, "resources.nodes", "at least 1, found 0"),
        ({"resources": {"nodes": -2}}, "resources.nodes", "at least 1, found -2"),
        ({"resources": {"nodes": "two"}}, "resources.nodes", "expected a whole number, found text ('two')"),
        ({"resources": {"nodes": {"min": 0, "max": 2}}}, "resources.nodes", "at least 1, found 0"),
        ({"resources": {"nodes": {"min": 3, "max": 2}}}, "resources.nodes", "'min' is more than 'max': 3 > 2"),
        ({"resources": {"nodes": {"min": 3}}}, "resources.nodes", "or {min: N, max: N}, found {'min': 3}"),
        ({"resources": {"nodes": {"min": 3, "maxi": 4}}}, "resources.nodes", "did you mean 'max'?"),
        ({"resources": {"spares": -1}}, "resources.spares", "at least 0"),
        ({"requeue": {"enabled": "no"}}, "requeue.enabled", "expected true or false"),
        ({"requeue": {"signal": "SIGTREM"}}, "requeue.signal", "did you mean 'SIGTERM'?"),
        ({"requeue": {"hang_after": 0.5}}, "requeue.hang_after", "at least 1"),
        ({"resources": {"gpus_per_node": -1}}, "resources.gpus_per_node", "at least 0"),
        ({"resources": {"mem": 4}}, "resources.mem", "4 has no unit"),
        ({"resources": {"mem": "4"}}, "resources.mem", "'4' has no unit"),
        ({"resources": {"time": 43200}}, "resources.time", "in quotes"),
        ({"resources": [1]}, "resources", "expected a section"),
        ({"command": "echo 'a"}, "command", "the quotes of the command do not match"),
        ({"command": 'echo "a'}, "command", "the quotes of the command do not match"),
        ({"command": "a\nb"}, "command", "a command is one line"),
        ({"command": ""}, "command", "found a blank text"),
        ({"command": ["python"]}, "command", "found a list"),
        ({"params": [1]}, "params", "expected a mapping"),
        ({"params": {"a.b": 1}}, "params.a.b", "cannot hold"),
        ({"params": {"a": {" ": 1}}}, "params.a. ", "expected a name"),
        ({"params": {"a": float("nan")}}, "params.a", "no such number"),
        ({"params": {"a": [1.0, float("inf")]}}, "params.a.1", "no such number"),
        ({"params": {"a": b"x"}}, "params.a", "found bytes"),
        ({"params": {"a": [b"x"]}}, "params.a.0", "bytes"),
        ({"params": {"api_key": "x"}}, "params.api_key", "looks like a secret"),
        ({"params": {"a": {"password": "x"}}}, "params.a.password", "looks like a secret"),
        ({"slurm": {"partition": ["a"]}}, "slurm.partition", "found a list"),
        ({"slurm": {"comment": "a\nb"}}, "slurm.comment", "line break"),
        ({"network": {"profile": "tpc"}}, "network.profile", "did you mean 'tcp'?"),
        ({"network": {"interface": "eth 0"}}, "network.interface", "cannot be an interface name"),
        ({"env": {"A-B": "x"}}, "env.A-B", "cannot name an environment variable"),
        ({"env": {"A": True}}, "env.A", "put it in quotes"),
        ({"env": {"A": None}}, "env.A", "expected text"),
        ({"setup": 3}, "setup", "expected a list"),
        ({"setup": "a\rb"}, "setup.0", "carriage return"),
        ({"setup": [1]}, "setup.0", "expected a line of shell"),
        ({"setup": ["a\rb"]}, "setup.0", "carriage return"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep", "found 0: a run resumes from its newest checkpoint"),
        ({"checkpoint": {"keep": -1}}, "checkpoint.keep", "found -1: a run resumes from its newest checkpoint"),
        ({"checkpoint": {"keep": {"last": 0}}}, "checkpoint.keep.last", "which must be kept"),
        ({"checkpoint": {"keep": "many"}}, "checkpoint.keep", "expected a whole number, found text ('many')"),
        ({"checkpoint": {"keep": [3]}}, "checkpoint.keep", "expected a section"),
        ({"checkpoint": {"keep": {"every_steps": 0}}}, "checkpoint.keep.every_steps", "at least 1, found 0"),
        ({"checkpoint": {"keep": {"best": {}}}}, "checkpoint.keep.best.metric", "this key is required"),
        ({"checkpoint": {"keep": {"best": "loss"}}}, "checkpoint.keep.best", "expected a section"),
        ({"checkpoint": {"keep": {"best": {"metric": 3}}}}, "checkpoint.keep.best.metric", "name of a metric"),
        ({"checkpoint": {"keep": {"best": {"metric": "a", "n": 0}}}}, "checkpoint.keep.best.n", "at least 1, found 0"),
        ({"checkpoint": {"verify": "hash"}}, "checkpoint.verify", "did you mean 'hashes'?"),
        ({"checkpoint": {"quota": 100}}, "checkpoint.quota", "100 has no unit"),
        ({"checkpoint": {"quota": "0GB"}}, "checkpoint.quota", "a size above zero"),
        ({"checkpoint": {"every": "often"}}, "checkpoint.every", "expected auto"),
        ({"checkpoint": {"every": {"steps": 0}}}, "checkpoint.every", "above zero"),
        ({"checkpoint": {"every": {"steps": 1.5}}}, "checkpoint.every", "whole number of steps"),
        ({"checkpoint": {"every": {"minutes": float("inf")}}}, "checkpoint.every", "above zero"),
        ({"tracking": {"mlflow": {"uri": "https://me:pass@host"}}}, "tracking.mlflow.uri", "credentials do not belong"),
    ],
)
def test_a_wrong_value_is_refused_at_its_key(data: dict[str, Any], key: str, message: str) -> None:
    at, text = only_mistake(**data)
    assert at == key
    assert message in text


@pytest.mark.parametrize(
    ("block", "lines"),
    [
        ("module load cuda", ("module load cuda",)),
        ("module load a\n\nif b; then\n  c\nfi\n", ("module load a", "", "if b; then", "  c", "fi")),
    ],
)
def test_a_block_of_text_under_setup_is_its_lines(block: str, lines: tuple[str, ...]) -> None:
    mistakes: list[str] = []
    assert read_spec({"command": "x", "setup": block}, lambda _, message: mistakes.append(message)).setup == lines
    assert mistakes == []


def test_a_params_value_that_is_a_list_of_dicts_is_refused_item_by_item() -> None:
    mistakes = mistakes_of({"name": "x", "command": "true", "params": {"layers": [{"size": 1}, 2, {"size": 3}]}})
    assert [at for at, _ in mistakes] == ["params.layers.0", "params.layers.2"]
    assert all("use a mapping instead" in message for _, message in mistakes)


@pytest.mark.parametrize(
    ("data", "key", "message"),
    [
        ({"checkpoint": {"every": {"step": 5}}}, "checkpoint.every", "; write {steps: 5}"),
        ({"checkpoint": {"every": {"steps": 1, "minutes": 1}}}, "checkpoint.every", "'steps' and 'minutes' exclude"),
        ({"checkpoint": {"every": {"steps": 1}, "glob": "*.pt"}}, "checkpoint.glob", "'glob' and 'every' exclude"),
        ({"checkpoint": {"keep": 5, "glob": "*.pt"}}, "checkpoint.glob", "your own script deletes what it no longer"),
        ({"checkpoint": {"verify": "sizes", "glob": "*.pt"}}, "checkpoint.glob", "'glob' and 'verify' exclude"),
        ({"checkpoint": {"quota": "1GB", "glob": "*.pt"}}, "checkpoint.glob", "'glob' and 'quota' exclude"),
        ({"resources": {"mem": "4GB"}, "slurm": {"mem-per-cpu": "1G"}}, "slurm", "'mem-per-cpu' and 'resources.mem'"),
        ({"requeue": {"oom": {"at_most": "4GB"}}}, "requeue", "'oom.at_most' lets it raise 'resources.mem'"),
        ({"resources": {"mem": "4GB"}, "requeue": {"oom": {"at_most": "1GB"}}}, "requeue", "less than 'resources.mem'"),
        ({"resources": {"mem": "4GB"}, "slurm": {"mem_per_gpu": "1G"}}, "slurm", "'mem-per-gpu' and 'resources.mem'"),
        ({"requeue": {"lead": "5m"}, "resources": {"time": "00:05:00"}}, "requeue", "write 'lead: 30s', or raise"),
        ({"slurm": {"mail-type": "END", "mail_type": "ALL"}}, "slurm", "are the same sbatch option"),
        ({"resources": {"procs_per_node": 3, "gpus_per_node": 2}}, "resources.procs_per_node", "cannot share 2 GPUs"),
        ({"preflight": {"clock": {"warn_ms": 9, "fail_ms": 1}}}, "preflight.clock.warn_ms", "above fail_ms"),
        ({"command": "x --from {resume_from}"}, "command", "set 'checkpoint.glob'"),
        ({"command": "x {resume_from?--go}"}, "command", "'{resume_from}' needs to know where checkpoints are"),
        (
            {"command": "x {resume_from?a b}", "checkpoint": {"glob": "*"}},
            "command",
            "does not end in the same",
        ),
        ({"command": "x {resume_form?a}"}, "command", "is no placeholder; did you mean 'resume_from'?"),
        ({"command": "x --tag {resume_tag}"}, "command", "'{resume_tag}' needs to know where checkpoints are"),
        ({"checkpoint": {"format": "hf"}}, "checkpoint.format", "'format' needs 'glob'"),
        ({"checkpoint": {"step": r"(\d+)"}}, "checkpoint.step", "'step' needs 'glob'"),
        (
            {"command": "x {resume_dir}", "checkpoint": {"glob": "*", "format": "own"}},
            "command",
            "'{resume_dir}' is always empty with 'checkpoint.format: own'",
        ),
    ],
)
def test_two_keys_that_exclude_each_other_are_refused(data: dict[str, Any], key: str, message: str) -> None:
    at, text = only_mistake(**data)
    assert at == key
    assert message in text


@pytest.mark.parametrize(
    ("written", "keep"),
    [
        (5, KeepSpec(last=5)),
        (None, KeepSpec()),
        ({}, KeepSpec(last=3, every_steps=None, best=None)),
        ({"every_steps": 1000}, KeepSpec(last=3, every_steps=1000)),
        ({"best": {"metric": "val/loss"}}, KeepSpec(last=3, best=BestSpec(metric="val/loss", mode="min", n=1))),
        (
            {"last": 1, "best": {"metric": "a", "mode": "max", "n": 2}},
            KeepSpec(last=1, best=BestSpec(metric="a", mode="max", n=2)),
        ),
    ],
)
def test_keep_may_be_a_number_or_a_mapping(written: object, keep: KeepSpec) -> None:
    assert good({"name": "x", "command": "true", "checkpoint": {"keep": written}}).checkpoint.keep == keep


@pytest.mark.parametrize(
    ("written", "nodes", "allocated", "elastic"),
    [
        ({"nodes": 4}, Nodes(4, 4), Nodes(4, 4), False),
        ({"nodes": {"min": 4, "max": 4}}, Nodes(4, 4), Nodes(4, 4), False),
        ({"nodes": {"min": 2, "max": 4}}, Nodes(2, 4), Nodes(2, 4), True),
        ({"nodes": 4, "spares": 1}, Nodes(4, 4), Nodes(5, 5), True),
        ({"nodes": {"min": 2, "max": 4}, "spares": 1}, Nodes(2, 4), Nodes(3, 5), True),
    ],
)
def test_a_job_has_the_nodes_that_train_and_the_spare_ones(
    written: dict[str, Any], nodes: Nodes, allocated: Nodes, elastic: bool
) -> None:
    resources = good({"name": "x", "command": "true", "resources": written}).resources
    assert (resources.nodes, resources.allocated, resources.elastic) == (nodes, allocated, elastic)


def test_a_number_of_nodes_is_written_as_one_and_a_range_as_sbatch_has_it() -> None:
    assert [nodes.to_dict() for nodes in (Nodes(2, 2), Nodes(2, 4))] == [2, {"min": 2, "max": 4}]
    assert [str(nodes) for nodes in (Nodes(2, 2), Nodes(2, 4))] == ["2", "2-4"]


@given(requeues)
def test_the_requeue_section_of_another_version_can_be_read(
    data: dict[str, Any],
) -> None:
    requeue = good({"name": "x", "command": "true", "requeue": data}).requeue
    plain = json.loads(json.dumps(write_requeue(requeue)))
    assert read_requeue({**plain, "of_a_later_version": 1}) == requeue
    assert read_requeue({}) == RequeueSpec()


def test_keep_is_written_in_full_and_a_quota_with_its_unit() -> None:
    plain = write_spec(good({"name": "x", "command": "true", "checkpoint": {"keep": 5, "quota": "1.5TB"}}))
    assert plain["checkpoint"]["keep"] == {"last": 5, "every_steps": None, "best": None}
    assert plain["checkpoint"]["quota"] == "1536GB"


def test_a_quota_is_a_number_of_bytes() -> None:
    assert good({"name": "x", "command": "true", "checkpoint": {"quota": "100GB"}}).checkpoint.quota == 100 << 30


def test_explicit_defaults_do_not_conflict_with_a_glob() -> None:
    defaults = {"every": "auto", "keep": 3, "verify": "hashes", "quota": None}
    assert good({"name": "x", "command": "true", "checkpoint": {**defaults, "glob": "*.pt"}}).checkpoint.glob == "*.pt"


def test_all_mistakes_are_reported_in_one_reading() -> None:
    mistakes = mistakes_of({"name": "a/b", "resources": {"nodes": 0, "mem": 4}, "evn": {}, "setup": 3})
    assert {at for at, _ in mistakes} == {"name", "command", "resources.nodes", "resources.mem", "evn", "setup"}


@pytest.mark.parametrize(
    ("resources", "processes"),
    [({}, 1), ({"gpus_per_node": 4}, 4), ({"procs_per_node": 3}, 3), ({"gpus_per_node": 2, "procs_per_node": 4}, 4)],
)
def test_there_is_one_process_a_gpu_unless_the_spec_sets_a_number(resources: dict[str, int], processes: int) -> None:
    assert good({"name": "x", "command": "true", "resources": resources}).resources.local_world_size == processes


def test_a_run_that_grows_divides_its_batch_into_more_parts_on_fewer_nodes() -> None:
    resources = ResourcesSpec(nodes=Nodes(1, 4), grow=True, accumulation=2)
    assert [resources.accumulation_on(nodes) for nodes in (4, 3, 2, 1)] == [2, 3, 4, 8]
    assert ResourcesSpec(nodes=Nodes(1, 4), accumulation=2).accumulation_on(1) == 2


def test_only_a_run_with_a_range_of_nodes_can_grow() -> None:
    assert [key for key, _ in ResourcesSpec(nodes=Nodes(2, 2), grow=True).conflicts()] == ["grow"]
    assert list(ResourcesSpec(nodes=Nodes(1, 2), grow=True).conflicts()) == []
