"""Where the values of a plan come from."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.specfiles import Load

SPEC = """extends: base.yaml
command: python train.py --lr ${params.lr}
params: {lr: 0.1}
slurm: {cores-per-socket: 2}
checkpoint:
  every: {minutes: 3}
sweep:
  params.width: [4,
    8]
"""


def sources_of(load: Load, text: str, *overrides: str, sweep: tuple[str, ...] = (), index: int = 0) -> dict[str, str]:
    spec = load(text, *overrides, sweep=sweep)
    return {
        each.key: str(each).replace(f"{spec.path.parent if spec.path else ''}/", "")
        for each in spec.sources(spec.runs[index])
    }


@pytest.fixture(autouse=True)
def base(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("name: a\nparams: {width: 1,\n  depth: 2}\nresources: {nodes: 2}\n")


def test_a_value_comes_from_the_line_of_the_file_that_sets_it(load: Load) -> None:
    sources = sources_of(load, SPEC)
    assert sources["params.depth"] == "base.yaml:3"
    assert sources["resources.nodes"] == "base.yaml:4"
    assert sources["params.lr"] == "exp.yaml:3"
    assert sources["slurm.cores-per-socket"] == "exp.yaml:4"
    assert sources["checkpoint.every.minutes"] == "exp.yaml:6"


def test_the_command_line_comes_before_the_file_and_the_last_override_before_others(load: Load) -> None:
    sources = sources_of(load, SPEC, "params.lr=1", "params.lr=2", "checkpoint.every.steps=5")
    assert sources["params.lr"] == "command line (params.lr=2)"
    assert sources["checkpoint.every.steps"] == "command line (checkpoint.every.steps=5)"


def test_a_swept_value_comes_from_its_item_in_the_sweep(load: Load) -> None:
    assert sources_of(load, SPEC, "params.width=3")["params.width"] == "sweep, exp.yaml:8"
    assert sources_of(load, SPEC, index=1)["params.width"] == "sweep, exp.yaml:9"
    swept = sources_of(load, SPEC, sweep=("params.lr=1,2",))
    assert swept["params.lr"] == "sweep, command line (params.lr=1,2)"


def test_what_nothing_sets_is_a_default_or_derived(load: Load) -> None:
    sources = sources_of(load, "command: python a.py\nresources: {gpus_per_node: 2}\n")
    assert sources["resources.nodes"] == "default"
    assert sources["resources.procs_per_node"] == "derived"
    assert sources["name"] == "derived"


def test_keys_beside_those_of_a_replaced_section_are_defaults(load: Load) -> None:
    text = "command: python a.py\nresources: {nodes: 3, gpus_per_node: 2}\n"
    sources = sources_of(load, text, "resources={nodes: 2}")
    assert sources["resources.nodes"] == "command line (resources={nodes: 2})"
    assert sources["resources.gpus_per_node"] == "default"


def test_a_section_in_short_sets_one_of_its_keys(load: Load) -> None:
    sources = sources_of(load, "command: python a.py\ncheckpoint: {keep: 7}\npreflight:\n  clock: warn\n")
    assert sources["checkpoint.keep.last"] == "exp.yaml:2"
    assert sources["checkpoint.keep.best"] == "default"
    assert sources["preflight.clock.level"] == "exp.yaml:4"
    assert sources["preflight.clock.warn_ms"] == "default"


def test_a_secret_of_the_command_line_is_in_no_source(load: Load) -> None:
    spec = load("command: python a.py\n", "env.API_TOKEN=hunter2")
    assert "hunter2" not in repr(spec.sources(spec.runs[0]))
