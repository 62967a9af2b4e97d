"""Any input is loaded, or refused with an error of slurmtrain."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from helpers.specfiles import BASE, PYTHON, SWEPT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurmtrain.errors import SlurmtrainError
from slurmtrain.model.spec.plan import Plan
from slurmtrain.specfile import load_spec

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
@given(st.dictionaries(st.sampled_from(["params", "env", "setup", "slurm", "sweep", "checkpoint"]), trees, max_size=3))
def test_any_content_of_a_known_section_is_loaded_or_refused_with_our_own_error(
    tmp_path: Path, data: dict[str, Any]
) -> None:
    check_any_input(tmp_path, yaml.safe_dump({"command": "python x.py", **data}))


@quietly
@given(st.text(max_size=40))
def test_any_text_as_a_parameter_is_loaded_or_refused_with_our_own_error(tmp_path: Path, text: str) -> None:
    check_any_input(tmp_path, BASE + "params:\n  x: " + text)


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
