"""All mistakes of a spec at once, each with its place; any input is read, or refused with a sentence."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.specfiles import BASE, PYTHON, SWEPT, Load, Mistakes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurmtrain.errors import PathError, SlurmtrainError, SpecError
from slurmtrain.model.experiment.plan import Plan, make_plan
from slurmtrain.model.experiment.spec import read_spec
from slurmtrain.ops.submit.command_script import missing_script
from slurmtrain.specfile import SiteRules, load_spec, replan

# --- files that are no spec ------------------------------------------------------------------------------------------


def test_a_file_that_is_not_there_is_named_with_the_nearest_spec_beside_it(tmp_path: Path) -> None:
    with pytest.raises(PathError, match=r"nowhere\.yaml: this file does not exist") as raised:
        load_spec(tmp_path / "nowhere.yaml", cwd=tmp_path, python=PYTHON)
    assert raised.value.exit_code == 2
    (tmp_path / "exp.yaml").touch()
    (tmp_path / "exp.txt").touch()
    with pytest.raises(PathError, match=r"exp\.yml: this file does not exist; did you mean 'exp\.yaml'\?$"):
        load_spec(tmp_path / "exp.yml", cwd=tmp_path, python=PYTHON)
    with pytest.raises(PathError, match="this is a directory"):
        load_spec(tmp_path, cwd=tmp_path, python=PYTHON)


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        ("command: bash -c 'echo a: b'\n", "put the value in quotes: command: \"bash -c 'echo a: b'\""),
        ("command: bash -c \"echo 'a': b\"\n", "command: 'bash -c \"echo ''a'': b\"'"),
        ("command: {run_dir}/x --a 1\n", 'command: "{run_dir}/x --a 1"'),
        ('command: "x" --a "b"\n', 'command: \'"x" --a "b"\''),
        ("checkpoint:\n  glob: *.pt\ncommand: x\n", 'glob: "*.pt"'),
        ("command: @x\n", 'command: "@x"'),
        ("command: x\nsetup:\n- @x\n", '- "@x"'),
        ("command: x\n\tname: a\n", "indent it like the line above: name: a"),
        ("command: x\nresources:\n\tnodes: 2\n", "indent with blanks instead of tabs: nodes: 2"),
        ("command: x\n name: a\n", "indent it like the line above: name: a"),
        ("command: x\nname: 'a\n", "close the quotes: name: 'a'"),
        ("command: x\nsetup: [a\n", "close the brackets: setup: [a]"),
    ],
)
def test_a_line_that_is_not_yaml_is_told_as_one_that_is_accepted(
    load: Load, mistakes: Mistakes, text: str, cure: str
) -> None:
    [(_, _, message)] = mistakes(text)
    assert message.endswith(cure)
    proposed = message.partition("; ")[2].partition(": ")[2]
    key = proposed.partition(" ")[0]
    lines = text.split("\n")
    [number] = [number for number, line in enumerate(lines) if line.strip().startswith(key)]
    indent = (
        "" if "like the line above" in message else "  " * ("\t" in lines[number] or lines[number].startswith("  "))
    )
    load("\n".join([*lines[:number], indent + proposed, *lines[number + 1 :]]))


# --- one mistake each ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "key", "message"),
    [
        ("\nresourses: {}\n", "3", "resourses", "unknown key; did you mean 'resources'?"),
        ("slurm:\n  partitoin: x\n", "3", "slurm.partitoin",
         "sbatch has no option --partitoin; did you mean 'partition'?"),
        # A value that cannot be read is one mistake, whatever else its key is.
        ("slurm: {time: 1:00}\n", "2", "slurm.time",
         'YAML reads an unquoted 1:00 as the number 60; put it in quotes: "1:00"'),
        ("name: a/b\n", "2", "name",
         "'a/b' cannot be the name of a run: '/' cannot be used; a name consists of letters, digits, '.', '_' and '-'"),
        ("tracking: {plugins: {csv: {dir: x}}}\n", "2", "tracking.plugins.csv",
         "csv is built into slurmtrain: write its settings under 'tracking.csv'"),
        ("launcher: nodes\n", "2", "launcher",
         "expected one of ranks, node, none, found 'nodes'; did you mean 'node'?"),
        ("checkpoint:\n  keep: 3\n  glob: '*.pt'\n  every: {steps: 5}\n", "4", "checkpoint.glob",
         "'glob' and 'every' exclude each other: with 'glob' your own script decides when to save"),
        # One mistake for all runs of a sweep.
        ("params: {lr: 1}\nresources: {nodes: 0}\nsweep: {params.lr: [1, 2, 3]}\n", "3", "resources.nodes",
         "expected a whole number of at least 1, found 0"),
        ("params:\n  lr: 1\n  day: 2024-01-01\n", "4", "params.day", ""),
        ("params:\n  x: .nan\n", "3", "params.x", ""),
        ("params:\n  layers:\n    - 1\n    - {size: 2}\n", "5", "params.layers.1", ""),
        ("resources: {procs_per_node: 4}\nlauncher: node\n", "1", "command", ""),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_at_its_line(mistakes: Mistakes, text: str, line: str, key: str, message: str) -> None:
    base = "command: torchrun --nproc-per-node 2 train.py\n" if key == "command" else BASE
    [(place, at, why)] = mistakes(base + text)
    assert (place, at) == (line, key)
    # What to write instead may follow.
    assert why == message or why.startswith(f"{message}; " if message else "")
    assert "put it in quotes" in why or key != "params.day"


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("lr", "; did you mean '${params.lr}'?"),
        ("params.lrr", "; did you mean 'params.lr'?"),
        ("LR", "; for an environment variable write ${oc.env:LR}"),
        ("nowhere", ""),
    ],
)
def test_an_interpolation_of_no_key_gets_the_nearest_one(mistakes: Mistakes, key: str, hint: str) -> None:
    text = f"command: python train.py --lr ${{{key}}}\nparams: {{lr: 0.1}}\n"
    assert mistakes(text) == [
        ("1", "command", f"the interpolation ${{{key}}} refers to a key that does not exist{hint}")
    ]


def test_an_override_that_is_written_with_blanks_is_one_mistake(mistakes: Mistakes) -> None:
    text = BASE + "params: {lr: 0.1}\n"
    assert mistakes(text, "params.lr", "=", "0.1") == [
        (
            "command line (params.lr = 0.1)",
            "",
            "expected key=value without blanks, for example resources.nodes=2",
        )
    ]
    [(where, _, message)] = mistakes(text, sweep=["params.lr"])
    assert (where, message.rpartition(" ")[2]) == ("command line (params.lr)", "params.lr=0.1,0.3")


def test_options_that_the_sites_own_sbatch_has_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "exp.yaml"
    path.write_text(BASE + "slurm: {container_image: a, zz-not: b}\n")

    def read(_: str) -> frozenset[str]:
        return frozenset({"container-image", "zz-note"})

    with pytest.raises(SpecError) as raised:
        load_spec(path, cwd=tmp_path, python=PYTHON, site=SiteRules(read))
    [mistake] = raised.value.mistakes
    assert (mistake.key, mistake.message) == (
        "slurm.zz-not",
        "this site's sbatch has no option --zz-not; did you mean 'zz-note'?",
    )
    path.write_text(BASE + "slurm: {container_image: a}\n")
    [planned] = load_spec(path, cwd=tmp_path, python=PYTHON, site=SiteRules(read)).runs
    # Where there is no sbatch, such as on a node, it can be read, and be planned again.
    again = replan(Plan.from_json(planned.plan.to_json()), ["slurm.qos=high"]).plan
    assert again.spec.slurm == {"container_image": "a", "qos": "high"}
    with pytest.raises(SpecError, match="has no option --zz-note"):
        replan(planned.plan, ["slurm.zz_note=1"])


@pytest.mark.parametrize("key", ["'['", "']'", "a[0]", "'.'", "''", "a.b", "resources.nodes", "${x}", "'${'"])
def test_a_strange_key_is_only_reported_as_unknown(mistakes: Mistakes, key: str) -> None:
    reported = mistakes(BASE + f"\n{key}: 2\n")
    assert [(line, at) for line, at, _ in reported] == [("3", key.strip("'"))]
    assert reported[0][2].startswith("unknown key")


# --- all of them at once ---------------------------------------------------------------------------------------------


def test_all_mistakes_of_a_file_are_reported_at_once_in_the_order_of_the_file(mistakes: Mistakes) -> None:
    text = """\
# a comment
setup: 3
resources:
  nodse: 2
  time: 1:00:00
  mem: 16
slurm:
  partitoin: spot
params:
  layers: [{a: 1}]
  path: ${nowhere.at.all}
command: "echo 'x"
name: a/b
"""
    assert [f"{line} {key}" for line, key, _ in mistakes(text)] == [
        "2 setup", "4 resources.nodse", "5 resources.time", "6 resources.mem", "8 slurm.partitoin",
        "10 params.layers.0", "11 params.path", "12 command", "13 name",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("word", "instead"),
    [("{lr}", "${params.lr}"), ("--lr={model.depth}", "${params.model.depth}"), ("{params.lr}", "${params.lr}")],
)
def test_braces_that_only_name_a_parameter_are_a_mistake_unless_they_are_quoted(
    load: Load, mistakes: Mistakes, word: str, instead: str
) -> None:
    text = "params: {lr: 0.1, model: {depth: 2}}\ncommand: >-\n  python x.py "
    name = word[word.index("{") :]
    [(_, key, message)] = mistakes(text + word)
    assert key == "command"
    assert message.startswith(f"{name} is not a placeholder; write {instead} for the value ")
    assert load(text + word.replace(name, instead)).warnings == ()
    for quoted in (word.replace(name, f"'{name}'"), word.replace(name, f'"{name}"')):
        assert load(text + quoted).warnings == ()


@pytest.mark.parametrize(
    ("override", "sweep", "others"),
    [
        ("params.lr=0.1,0.3", "params.lr=0.1,0.3", ["params.lr=[0.1,0.3]", "params.lr='0.1,0.3'"]),
        ("params.amp=true,false", "params.amp=true,false", ["params.amp=[true,false]", "params.amp='true,false'"]),
        ("resources.nodes=1,2", "resources.nodes=1,2", []),
        ("checkpoint.keep=1,2", "checkpoint.keep=1,2", []),
    ],
)
def test_several_values_for_a_key_that_has_one_are_a_sweep(
    load: Load, mistakes: Mistakes, override: str, sweep: str, others: list[str]
) -> None:
    text = BASE + "params: {lr: 0.1, amp: false, tags: a}\n"
    [(where, _, message)] = mistakes(text, override)
    assert where == f"command line ({override})"
    assert f"--sweep {sweep}" in message
    assert len(load(text, sweep=[sweep]).runs) == 2
    for other in others:
        assert {shlex.join([other]), other.replace("='", "=\"'") + '"'} & {*re.split("; for [a-z ]+: ", message)}
        load(text, other)
    load(text, "params.tags=1,2")


def test_mistakes_of_file_and_command_line_are_reported_together(mistakes: Mistakes) -> None:
    reported = mistakes(
        BASE + "resources: {nodes: 0}\n", "resources.gpus_per_node=-1", "nonsense", "foo=1", sweep=["resources.gpu=1"]
    )
    assert {where for where, _, _ in reported} == {
        "2",
        "command line (resources.gpus_per_node=-1)",
        "command line (nonsense)",
        "command line (foo=1)",
        "command line (resources.gpu=1)",
    }


# --- launchers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        ("command: srun -n 2 python train.py\n", "write 'python train.py'"),
        ("command: mpirun -np 2 python train.py\n", "set 'launcher: none'"),
        ("command: bash -c 'torchrun x.py'\nresources: {procs_per_node: 2}\n", "set 'launcher: node'"),
        ("command: bash -c 'srun python x.py'\nlauncher: node\n", "leave srun and its options out"),
    ],
)
def test_a_command_that_would_start_ranks_in_each_rank_is_refused_with_what_to_write(
    text: str, cure: str, mistakes: Mistakes, load: Load
) -> None:
    [(_, key, message)] = mistakes(text)
    assert key == "command"
    assert cure in message
    if cure.startswith("set"):
        assert load(text + cure.removeprefix("set ").strip("'") + "\n").runs
    elif cure.startswith("write"):
        assert load(f"command: {cure.removeprefix('write ')}\n").runs


def test_numbers_that_only_the_command_says_are_in_the_plan(load: Load, mistakes: Mistakes) -> None:
    command = "command: torchrun --nnodes 2 --nproc_per_node 4 train.py\n"
    [run] = load(command).runs
    assert (run.plan.spec.resources.nodes.max, run.plan.spec.resources.procs_per_node) == (2, 4)
    assert "'resources.procs_per_node' is 4, as --nproc_per_node says" in run.plan.launcher_notes()
    [same] = load(f"{command}resources: {{nodes: 2, procs_per_node: 4}}\n").runs
    assert same.plan.hash == run.plan.hash
    [(_, _, message)] = mistakes(f"{command}resources: {{nodes: 1}}\n")
    assert "--nnodes 2, but resources.nodes is 1" in message


# --- options of Slurm ------------------------------------------------------------------------------------------------


def test_options_of_slurm_that_are_not_passed_on_are_mistakes_at_their_lines(mistakes: Mistakes) -> None:
    text = """resources: {components: [{nodes: 1, slurm: {gres: "gpu:2"}}, {nodes: 1}]}
command: python x.py
slurm:
  gpus: a40:4
  sbatch:
  - -p spot
  - --quiet
  srun: ["--cpu-bind=cores"]
"""
    assert [(line, key, message.partition(":")[0]) for line, key, message in mistakes(text)] == [
        ("1", "resources.components.0.slurm.gres", "--gres is not passed on"),
        ("4", "slurm.gpus", "--gpus is not passed on"),
        ("7", "slurm.sbatch.1", "--quiet is not passed on"),
        ("8", "slurm.srun.0", "--cpu-bind is not passed on"),
    ]
    [(_, _, gpus)] = mistakes("resources: {nodes: 2}\ncommand: python x.py\nslurm: {gpus: a40:4}\n")
    assert gpus.endswith("use 'resources.gpus_per_node: a40:2'")


def test_a_run_of_an_earlier_version_keeps_options_that_are_refused_now() -> None:
    data = {"name": "x", "command": "python x.py", "slurm": {"gres": "gpu:2", "srun": ["--cpu-bind=cores"]}}
    spec = read_spec(data, lambda at, message: pytest.fail(f"{at}: {message}"))
    plan = Plan.from_json(make_plan(spec, workdir="/w", python=PYTHON, template=data)[0].to_json())
    assert replan(plan, ["resources.mem=4GB"]).plan.spec.slurm == spec.slurm
    with pytest.raises(SpecError, match=r"use 'resources\.gpus_per_node: 4'"):
        replan(plan, ["slurm.gres=gpu:4"])


words = st.sampled_from(
    ["name", "command", "workdir", "params", "resources", "slurm", "network", "preflight", "checkpoint", "requeue",
     "tracking", "env", "setup", "sweep", "nodes", "mem", "time", "clock", "mlflow", "uri", "every", "steps", "glob",
     "partition", "API_TOKEN", "params.lr", "lr", "<<", "a.b", "a[0]", "[", "", "extends", "zip", "points", "include",
     "exclude", "samples", "seed", "parallel"]
)  # fmt: skip
keys = words | st.text(max_size=5)
values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10), st.binary(max_size=4), st.dates(),
    st.datetimes(),
    st.sampled_from(["${", "${lr}", "${params.lr}", "${oc.env:HOME}", "${${x}}", "???", "12:00:00", "4GB", "echo 'a",
                     "{resume_from}", "python x.py", "auto", "1e3", "$", "\\${x}", "${oc.env:}", "${.}", "${..name}",
                     "any.yaml", "~nobody/x", "../x",
                     "range(2)", "uniform(0, 1)", "logspace(1, 2, 2)"]),
)  # fmt: skip
trees = st.recursive(
    values, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=10
)
sections = st.dictionaries(keys, trees, max_size=5)
quietly = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def check_any_input(tmp_path: Path, text: str, overrides: Sequence[str] = (), sweep: Sequence[str] = ()) -> None:
    """Loading raises nothing but our own errors, and what it gives can be written and read back."""
    path = tmp_path / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        loaded = load_spec(path, overrides, sweep, cwd=tmp_path, python=PYTHON)
    except SlurmtrainError as error:
        if not str(error):
            raise
        return
    assert loaded.runs
    for run in loaded.runs:
        written = json.dumps(run.plan.to_json(), allow_nan=False)
        assert Plan.from_json(json.loads(written)).hash == run.plan.hash


@quietly
@given(sections, st.booleans())
def test_any_yaml_document_is_loaded_or_refused_with_our_own_error(
    tmp_path: Path, data: dict[str, Any], runs: bool
) -> None:
    check_any_input(tmp_path, yaml.safe_dump({**data, "command": "python x.py"} if runs else data, allow_unicode=True))


@quietly
@given(
    st.lists(
        st.builds(
            "{}={}".format, keys | st.sampled_from(["params.lr", "+params.x", "setup.0", "env.A"]), st.text(max_size=12)
        )
    ),
    st.lists(
        st.builds("{}={}".format, st.sampled_from(["params.lr", "resources.nodes", "name"]), st.text(max_size=8)),
        max_size=2,
    ),
)
def test_any_override_is_applied_or_refused_with_our_own_error(
    tmp_path: Path, overrides: list[str], sweep: list[str]
) -> None:
    check_any_input(tmp_path, SWEPT, overrides, sweep)


COMMAND = "command: python -c pass\n"


@pytest.mark.parametrize("values", ["{range: [0, 71]}", "{linspace: [0, 1, 5]}", "{min: 0, max: 1}", "{choice: [1]}"])
def test_the_short_form_of_values_is_accepted_in_braces_too(load: Load, mistakes: Mistakes, values: str) -> None:
    [(_, _, message)] = mistakes(f"{COMMAND}params: {{s: 1}}\nsweep: {{params.s: {values}}}\n")
    proposed = re.findall(r"'([a-z.]+: [^']+)'", message)
    assert proposed, message
    load(f"{COMMAND}params: {{s: 1}}\nsweep: {{{', '.join(proposed)}}}\n")
    load(f"{COMMAND}params: {{s: 1}}\nsweep:\n" + "".join(f"  {each}\n" for each in proposed))


def test_a_call_that_a_comma_has_ended_is_to_be_put_in_quotes(mistakes: Mistakes) -> None:
    [(_, _, message), *_] = mistakes(f"{COMMAND}params: {{s: 1}}\nsweep: {{params.s: range(0, 71)}}\n")
    assert message.endswith("found 'range(0'; in braces, put all of it in quotes: a comma ends it otherwise")


@pytest.mark.parametrize("name", ["SLURM_TMPDIR", "NO_SUCH_VARIABLE"])
def test_a_variable_that_is_not_set_here_gets_a_value_or_a_shell(load: Load, mistakes: Mistakes, name: str) -> None:
    assert name not in os.environ
    [(_, key, message)] = mistakes(f"{COMMAND}env: {{D: '${{oc.env:{name}}}/x'}}\n")
    assert key == "env.D"
    [proposed] = re.findall(r"write (\$\{\S+?\})", message)
    assert load(f"{COMMAND}env: {{D: '{proposed}/x'}}\n").runs[0].plan.spec.env["D"] == "VALUE/x"
    [command] = re.findall(r"bash -c .*$", message)
    assert not load(f'command: "{command}"\n').warnings


def test_a_script_that_is_missing_is_told_with_all_other_mistakes(tmp_path: Path) -> None:
    spec = tmp_path / "exp.yaml"

    def keys(text: str) -> list[str]:
        spec.write_text(text)
        with pytest.raises(SpecError) as raised:
            load_spec(spec, cwd=tmp_path, python=PYTHON, site=SiteRules(missing_script=missing_script))
        return [mistake.key for mistake in raised.value.mistakes]

    wrong = "slurm: {gres: gpu:4, mail_type: [END]}\nresources: {nodes: 2-4}\n"
    of_rest = ["slurm.mail_type", "slurm.gres", "resources.nodes"]
    assert keys(f"command: python missing.py\n{wrong}") == ["command", *of_rest]
    # What may make it, or move, or lies elsewhere, and what cannot be told.
    assert keys(f"command: python missing.py\nsetup: [touch missing.py]\n{wrong}") == of_rest
    assert keys(f"command: python missing.py\nworkdir: nowhere\n{wrong}") == of_rest
    assert keys(f"command: python -m missing\n{wrong}") == of_rest
    (tmp_path / "missing.py").touch()
    assert keys(f"command: python -u missing.py\n{wrong}") == of_rest


def test_a_file_name_that_cannot_name_a_run_asks_for_a_name(tmp_path: Path) -> None:
    path = tmp_path / "my exp.yaml"
    path.write_text(BASE)
    with pytest.raises(SpecError, match=r"the file's name cannot be the name of the run .* set 'name'"):
        load_spec(path, cwd=tmp_path, python=PYTHON)
