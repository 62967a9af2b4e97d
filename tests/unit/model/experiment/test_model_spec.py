"""The schema of a spec: what is read, what is refused, and that what is written reads back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.specs import only_mistake, read, spec
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.experiment.checkpoint import VERIFY
from slurmtrain.model.experiment.kinds import HOMES, OTHER_NAMES, Section, keys_of, walk_keys
from slurmtrain.model.experiment.resources import ResourcesSpec
from slurmtrain.model.experiment.sections import RequeueSpec, read_requeue, write_requeue
from slurmtrain.model.experiment.slurm_options import PASSED
from slurmtrain.model.experiment.spec import NETWORK_PROFILES, Spec, complete_override, write_spec
from slurmtrain.model.experiment.values import Nodes, is_secret_param
from slurmtrain.specfile.json_schema import texts_of_keys

# --- defaults and round trip ------------------------------------------------------------------------------------


def good(data: object) -> Spec:
    made, mistakes = read(data)
    assert mistakes == []
    return made


# --- defaults and round trip ------------------------------------------------------------------------------------


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
    plain = write_spec(
        spec(
            checkpoint={"keep": {"best": {"metric": "loss"}}, "quota": "1.5TB"},
            tracking={"metrics": {"file": "metrics.csv"}},
            resources={"mem": "1GB"},
            requeue={"oom": {"at_most": "2GB"}},
            start_from="a",
            strategy={"mesh": {"tp": 1}, "activation_checkpointing": True},
            profile={"steps": [1, 2]},
        )
    )
    for path, _ in walk_keys(Spec):
        inside: Any = plain
        for key in path:
            assert key in inside, path
            inside = inside[key]
    assert plain["checkpoint"]["quota"] == "1536GB"
    keep = write_spec(spec(checkpoint={"keep": 5}))["checkpoint"]["keep"]
    assert keep == {"last": 5, "every_steps": None, "best": None}


def test_every_key_has_a_text_for_the_reference_and_a_default() -> None:
    for path, key in walk_keys(Spec):
        assert key.kind.text, path
        assert path[-1] in HOMES
    for section in (Spec, *(key.kind.cls for _, key in walk_keys(Spec) if isinstance(key.kind, Section))):
        texts = texts_of_keys(section)
        assert {name for name, text in texts.items() if text.endswith(".")} == keys_of(section).keys()


# --- keys and values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "key", "hint"),
    [
        ({"resourses": {}}, "resourses", "did you mean 'resources'?"),
        ({"preflight": {"clock": {"warn": 1}}}, "preflight.clock.warn", "did you mean 'warn_ms'?"),
        ({"resources": {"gpu": 2}}, "resources.gpu", "did you mean 'gpus_per_node'?"),
        ({"preflight": {"gpus": "off"}}, "preflight.gpus", "did you mean 'gpu'?"),
        ({"checkpoint": {"keep": {"best": {"metric": "a", "mode": "mx"}}}}, "checkpoint.keep.best.mode", "'max'?"),
        ({"nodes": 2}, "nodes", "it belongs under 'resources'"),
        ({"resources": {"command": "x"}}, "resources.command", "it belongs at the top level"),
        ({"partition": "spot"}, "partition", "it belongs under 'slurm'"),
        ({"gpus": 2}, "gpus", "did you mean 'resources.gpus_per_node'?"),
        ({"checkpoint": {"interval": 5}}, "checkpoint.interval",
         "the keys here are every, format, glob, keep, quota, step, verify"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_refused_at_any_depth_with_a_hint(data: dict[str, Any], key: str, hint: str) -> None:
    at, message = only_mistake(**data)
    assert at == key
    assert hint in message


def test_a_missing_command_is_one_mistake_with_and_without_a_slip_of_it() -> None:
    assert read({"name": "x"})[1] == [("command", "this key is required")]
    for name in ("comand", "cmd", "script", "run"):
        assert read({"name": "x", name: "true"})[1] == [(name, "unknown key; did you mean 'command'?")]
    assert [key for key, _ in read({"name": "x", "nodes": 2})[1]] == ["nodes", "command"]


def test_what_other_programs_call_a_key_leads_to_a_key_that_there_is() -> None:
    keys = {*(path for path, _ in walk_keys(Spec)), ("sweep",), ("slurm", "partition")}
    assert {*OTHER_NAMES.values()} <= keys
    assert not {(*path[:-1], name) for name, path in OTHER_NAMES.items()} & keys


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("name", "a/b", "cannot be the name of a run"),
        *(("seed", seed, "expected a whole number") for seed in (-1, 2**32, 1.0, "7", True, [1])),
        ("deterministic", "yes", "expected true or false"),
        ("requeue", False, "; write {enabled: false}"),
        ("resources.nodes", 0, "at least 1, found 0"),
        ("resources.nodes", "two", "expected a whole number, found text ('two')"),
        ("resources.nodes", {"min": 3, "max": 2}, "'min' is more than 'max': 3 > 2"),
        ("resources.nodes", {"min": 3}, "or {min: N, max: N}, found {'min': 3}"),
        ("resources.nodes", {"min": 3, "maxi": 4}, "did you mean 'max'?"),
        ("requeue.enabled", "no", "expected true or false"),
        ("requeue.hang_after", 0.5, "at least 1"),
        ("requeue.keep_nodes", "10x", "expected a time, found text ('10x')"),
        ("requeue.keep_nodes", "0m", "expected a time above zero"),
        ("requeue.lead", "70000s", "expected at most 65535s, found '70000s'"),
        ("setup>0", ["a\rb"], "carriage return"),
        ("env.A", None, "expected text"),
        ("requeue.oom.accumulation", "x1.5", "expected a whole factor"),
        ("command", "echo 'a", "the quotes of the command do not match"),
        ("command", "a\nb", "a command is one line"),
        ("command", ["python"], "found a list"),
        ("command", ["python", "train.py"], "; write python train.py"),
        ("params>a.b", {"a.b": 1}, "cannot hold"),
        ("params.a> ", {" ": 1}, "expected a name"),
        ("params.a", float("nan"), "no such number"),
        ("params.a", b"x", "found bytes"),
        ("params.api_key", "x", "looks like a secret"),
        ("slurm.partition", ["a"], "found a list"),
        ("slurm.comment", "a\nb", "line break"),
        ("network.interface", "eth 0", "cannot be the name of an interface"),
        ("env.A-B", "x", "cannot be the name of an environment variable"),
        ("env.A", True, "put it in quotes"),
        ("setup>0", [1], "expected a line of shell"),
        ("checkpoint.keep", 0, "found 0: a run resumes from its newest checkpoint"),
        ("checkpoint.keep.every_steps", 0, "at least 1, found 0"),
        ("checkpoint.keep.best>metric", {}, "this key is required"),
        ("checkpoint.keep.best>n", {"metric": "a", "n": 0}, "at least 1, found 0"),
        ("checkpoint.quota", 100, "100 has no unit"),
        ("checkpoint.every", "often", "expected auto"),
        ("checkpoint.every", {"steps": 0}, "above zero"),
        ("checkpoint.every", {"step": 5}, "; write {steps: 5}"),
        ("checkpoint.every", {"steps": 1, "minutes": 1}, "'steps' and 'minutes' exclude"),
        ("checkpoint.format", "hf", "'format' needs 'glob'"),
        ("checkpoint.step", r"(\d+)", "'step' needs 'glob'"),
        ("command", "x --from {resume_from}", "set 'checkpoint.glob'"),
        ("command", "x {resume_form?a}", "is not a placeholder; did you mean 'resume_from'?"),
        ("tracking.mlflow.uri", "https://me:pass@host", "credentials do not belong"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_at_its_key(key: str, value: object, message: str) -> None:
    """``key``: where the value stands, and after a ``>`` what of it is wrong."""
    data: Any = value
    for name in reversed(key.partition(">")[0].split(".")):
        data = {name: data}
    at, text = only_mistake(**data)
    assert at == key.replace(">", ".")
    assert message in text


@pytest.mark.parametrize(
    ("key", "data", "message"),
    [
        ("checkpoint.glob", {"checkpoint": {"every": {"steps": 1}, "glob": "*"}}, "'glob' and 'every' exclude"),
        ("checkpoint.glob", {"checkpoint": {"keep": 5, "glob": "*"}}, "your own script deletes files"),
        ("checkpoint.glob", {"checkpoint": {"verify": "sizes", "glob": "*"}}, "'glob' and 'verify' exclude"),
        ("checkpoint.glob", {"checkpoint": {"quota": "1GB", "glob": "*"}}, "'glob' and 'quota' exclude"),
        ("slurm", {"resources": {"mem": "4GB"}, "slurm": {"mem-per-cpu": "1G"}}, "'mem-per-cpu' and 'resources.mem'"),
        ("slurm", {"resources": {"mem": "4GB"}, "slurm": {"mem_per_gpu": "1G"}}, "'mem-per-gpu' and 'resources.mem'"),
        ("requeue", {"requeue": {"oom": {"at_most": "4GB"}}}, "'oom.at_most' raises 'resources.mem'"),
        ("requeue", {"resources": {"mem": "4GB"}, "requeue": {"oom": {"at_most": "1GB"}}}, "less than 'resources.mem'"),
        *(("requeue.oom.mem", {"resources": {"mem": "1GB"}, "requeue": {"oom": {"at_most": "4GB", "mem": factor}}},
           "a factor above 1 such as 'x2'") for factor in (2, "x1")),
        ("requeue.oom", {"resources": {"mem": "1GB"}, "requeue": {"oom": {"mem": "x2"}}}, "nothing says how much more "
                                                                                          "the run may get"),
        ("requeue", {"resources": {"accumulation": 4},
                     "requeue": {"oom": {"accumulation": "x2", "max_accumulation": 3}}},
         "is less than 'resources.accumulation'"),
        ("requeue", {"requeue": {"lead": "5m"}, "resources": {"time": "00:05:00"}}, "write 'lead: 30s', or raise"),
        ("slurm", {"slurm": {"mail-type": "END", "mail_type": "ALL"}}, "are the same sbatch option"),
        ("resources.procs_per_node", {"resources": {"procs_per_node": 3, "gpus_per_node": 2}}, "cannot share 2 GPUs"),
        ("preflight.clock.warn_ms", {"preflight": {"clock": {"warn_ms": 9, "fail_ms": 1}}}, "above fail_ms"),
        ("command", {"command": "x {resume_from?a b}", "checkpoint": {"glob": "*"}}, "does not end in the same"),
        ("command", {"command": "x {resume_dir}", "checkpoint": {"glob": "*", "format": "own"}},
         "'{resume_dir}' is always empty with 'checkpoint.format: own'"),
    ],
)  # fmt: skip
def test_keys_that_exclude_each_other_are_refused(key: str, data: dict[str, Any], message: str) -> None:
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
    assert spec(setup=block).setup == lines


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
    resources = spec(resources=written).resources
    assert (resources.nodes, resources.allocated, resources.elastic) == (nodes, allocated, elastic)
    assert [each.to_dict() for each in (Nodes(2, 2), Nodes(2, 4))] == [2, {"min": 2, "max": 4}]
    assert [str(each) for each in (Nodes(2, 2), Nodes(2, 4))] == ["2", "2-4"]


@given(requeues)
def test_the_requeue_section_of_another_version_can_be_read(data: dict[str, Any]) -> None:
    requeue = spec(requeue=data).requeue
    plain = json.loads(json.dumps(write_requeue(requeue)))
    assert read_requeue({**plain, "of_a_later_version": 1}) == requeue
    assert read_requeue({}) == RequeueSpec()


def test_a_run_that_grows_divides_its_batch_into_more_parts_on_fewer_nodes() -> None:
    resources = ResourcesSpec(nodes=Nodes(1, 4), grow=True, accumulation=2)
    assert [resources.accumulation_on(nodes) for nodes in (4, 3, 2, 1)] == [2, 3, 4, 8]
    assert ResourcesSpec(nodes=Nodes(1, 4), accumulation=2).accumulation_on(1) == 2
    assert [key for key, _ in ResourcesSpec(nodes=Nodes(2, 2), grow=True).conflicts()] == ["grow"]
    assert list(ResourcesSpec(nodes=Nodes(1, 2), grow=True).conflicts()) == []


SPEC = {"params": {"lr": 0.1, "model": {"depth": 3}}, "env": {"HOME": "/x"}, "params.odd": 1}


@pytest.mark.parametrize(
    ("begun", "expected"),
    [
        ("na", ["name="]),
        ("par", ["params."]),
        ("params.", ["params.lr=", "params.model.", "params.odd="]),
        ("params.model.d", ["params.model.depth="]),
        ("env.", ["env.HOME="]),
        ("params.lr=", []),
        ("tracking.mlflow.enabled=t", ["tracking.mlflow.enabled=true"]),
        ("nothing.", []),
        ("slurm.nodelis", ["slurm.nodelist="]),
    ],
)
def test_a_key_is_completed_section_by_section(begun: str, expected: list[str]) -> None:
    assert complete_override(begun, SPEC) == expected


@pytest.mark.parametrize(
    ("keys", "place", "words"),
    [
        ({"profile": "torch"}, "profile", "set 'steps', such as '[100, 110]', to the steps that are traced"),
        ({"profile": {}}, "profile", "set 'steps'"),
        ({"profile": {"steps": [9, 9]}}, "profile.steps", "the smaller one first, found [9, 9]"),
        ({"profile": {"steps": [1, 2.5]}}, "profile.steps", "expected two numbers of steps, found [1, 2.5]"),
        ({"profile": {"steps": "100-110"}}, "profile.steps", "write for example [100, 110]"),
        ({"profile": {"tool": "nsys", "steps": [1, 2]}}, "profile.steps", "nsys records whole ranks"),
        ({"profile": "ncu"}, "profile", "'ncu'"),
        ({"idle_after": 0}, "idle_after", "expected a time"),
        ({"idle_after": "soon"}, "idle_after", "write for example 90s, 10m or 2h"),
        ({"idle_after": "1h", "tracking": {"system_metrics": False}}, "idle_after", "'tracking.system_metrics'"),
    ],
)
def test_profiles_and_idle_times_that_mean_nothing_are_refused(keys: dict[str, Any], place: str, words: str) -> None:
    at, message = only_mistake(**keys)
    assert at == place
    assert words in message
