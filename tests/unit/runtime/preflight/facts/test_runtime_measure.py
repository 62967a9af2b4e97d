"""What a node measures of itself."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import slurmtrain
from slurmtrain.model.experiment.kinds import Section, keys_of
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.resources import ResourcesSpec
from slurmtrain.model.experiment.sections import PreflightSpec
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.preflight import checks
from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.runtime.preflight.facts import gpus, measure
from slurmtrain.runtime.preflight.facts.measure import (
    CheckedNode,
    NodeContext,
    find_plugins,
    measure_all,
    remove_shared_file,
    run_plugin,
)

TOKEN = "5eed" * 16
OWN = {"shared", "versions", "gpu", "hardware", "disk", "tmp", "shm", "limits", "dns", "straggler", "environment"}
# A run that measures nothing but what a test switches on.
QUIET = {name: {"level": "off"} for name in OWN}

MakeContext = Callable[..., NodeContext]


@pytest.fixture
def make_context(tmp_path: Path) -> MakeContext:
    """A node of an attempt in a directory of this test. ``preflight``: sections by name; ``gpus``: GPUs a node."""

    def make(*, preflight: Mapping[str, Any] | None = None, gpus: int = 0, **changes: Any) -> NodeContext:
        base = PreflightSpec()
        changed = {
            name: replace(getattr(base, name), **value) if isinstance(value, dict) and name != "plugins" else value
            for name, value in (preflight or {}).items()
        }
        attempt = RunsRoot(tmp_path).run("r").attempt("7", 0)
        attempt.path.mkdir(parents=True, exist_ok=True)
        spec = Spec(preflight=replace(base, **changed), resources=ResourcesSpec(gpus_per_node=gpus), params={"lr": 0.1})
        values: dict[str, Any] = {
            "node": 0,
            "nodes": 1,
            "host": "node0",
            "executor": "slurm",
            "attempt": attempt,
            "plan": Plan(spec=spec, workdir="/", python=sys.executable, template={}),
            "addresses": ["127.0.0.1"],
            "token": TOKEN,
            "environ": {"TMPDIR": str(tmp_path)},
        }
        return NodeContext(**{**values, **changes})

    return make


def only_checks(*checks: str, **more: Any) -> dict[str, Any]:
    """Sections of a preflight in which these checks alone are on."""
    return {**QUIET, **{check: {} for check in checks}, **more}


@pytest.fixture
def hanging() -> Iterator[Callable[..., Any]]:
    """A function that hangs until the test is over."""
    over = threading.Event()

    def hang(*_: object, **__: object) -> dict[str, Any]:
        over.wait(60)
        return {}

    yield hang
    over.set()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take no measure that ends by itself for one that hangs, however long a busy disk or machine keeps it."""
    monkeypatch.setattr(measure, "_GRACE_S", 60.0)


# --- all of them ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("patient")
def test_a_single_node_measures_every_check_and_what_is_measured_can_be_judged(make_context: MakeContext) -> None:
    node = make_context(preflight={"limits": {"min_nofile": 1}})
    facts = measure_all(node)
    assert facts.keys() == OWN
    assert {name for name, of_check in facts.items() if of_check.keys() & {"error", "timeout"}} == set()
    assert {name for name, of_check in facts.items() if "skip" in of_check} == {"gpu", "hardware", "straggler"}
    assert json.loads(json.dumps(facts)) == facts
    findings = checks.judge_checks({0: facts}, node.plan.spec, {0: "node0"})[0]
    assert [finding.check for finding in findings] == [
        name for name, key in keys_of(PreflightSpec).items() if isinstance(key.kind, Section) and name in OWN
    ]  # fmt: skip
    assert [finding.summary for finding in findings if "cannot be judged" in finding.summary] == []


def test_a_check_that_hangs_is_a_timeout_and_does_not_delay_the_others(
    make_context: MakeContext, hanging: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", hanging)
    facts = measure_all(make_context(preflight=only_checks("disk", "limits", timeout_s=1.0)))
    assert facts["disk"] == {"timeout": 1.0}
    assert "nofile" in facts["limits"]


def test_a_check_that_hangs_does_not_keep_the_program_from_ending() -> None:
    program = """
import os, sys, threading
from slurmtrain.runtime.preflight.facts.measure import _ParallelMeasurements
measurements = _ParallelMeasurements()
measurements.start("hangs", threading.Event().wait, 0.1)
print(measurements.facts())
"""
    opened = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert opened.stdout == "{'hangs': {'timeout': 0.1}}\n"


@pytest.mark.parametrize("error", [RuntimeError("no\nway"), SystemExit(3), KeyboardInterrupt()])
def test_a_check_that_raises_is_an_error(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(measure, "describe_obsolete", fail)
    facts = measure_all(make_context(preflight=only_checks("environment")))
    assert facts["environment"] == {"error": f"{type(error).__name__}: {error}"}


# --- shared -----------------------------------------------------------------------------------------------------


def test_all_nodes_read_what_node_0_wrote(make_context: MakeContext) -> None:
    nodes = [make_context(preflight=only_checks("shared"), node=node, nodes=3) for node in range(3)]
    facts: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda n=n: facts.update({n.node: measure_all(n)["shared"]})) for n in nodes]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    assert facts[0].keys() == {"write_ms", "read_ms"}
    assert facts[1].keys() == facts[2].keys() == {"read_ms"}


def test_what_is_written_is_private_and_removed_once_all_have_read_it(make_context: MakeContext) -> None:
    node = make_context(preflight=only_checks("shared"))
    assert measure_all(node)["shared"].keys() == {"write_ms", "read_ms"}
    (written,) = node.attempt.path.iterdir()
    assert written.stat().st_mode & 0o777 == 0o600
    assert TOKEN not in written.name + written.read_text()
    remove_shared_file(node)
    assert list(node.attempt.path.iterdir()) == []
    remove_shared_file(node)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("different", ["directory", "attempt", "content"])
def test_a_node_does_not_see_a_file_elsewhere_of_another_attempt_or_with_other_content(
    make_context: MakeContext, tmp_path: Path, different: str
) -> None:
    preflight = only_checks("shared", timeout_s=60.0, shared={"timeout_s": 0.3})
    first = make_context(preflight=preflight, nodes=2, token="another" if different == "attempt" else TOKEN)
    measure_all(first)
    attempt = first.attempt
    if different == "directory":
        attempt = RunsRoot(tmp_path / "elsewhere").run("r").attempt("7", 0)
        attempt.path.mkdir(parents=True)
    elif different == "content":
        (written,) = attempt.path.iterdir()
        written.write_text(written.read_text()[:-1])
    assert measure_all(make_context(preflight=preflight, node=1, nodes=2, attempt=attempt))["shared"] == {
        "unseen": True
    }
    assert len(list(attempt.path.iterdir())) == (different != "directory")


def test_the_directory_is_opened_before_each_read_to_refresh_the_cache_of_nfs(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    really_open = os.open

    def note_open(path: Path, *arguments: int) -> int:
        opened.append(path)
        return really_open(path, *arguments)

    node = make_context(preflight=only_checks("shared", shared={"timeout_s": 0.1}), node=1, nodes=2)
    monkeypatch.setattr(measure, "write_atomically", lambda path, content: path.touch())
    monkeypatch.setattr(os, "open", note_open)
    monkeypatch.setattr(Path, "read_bytes", lambda path: opened.append("read") or b"")
    assert measure_all(node)["shared"] == {"unseen": True}
    assert [each for each in opened if each in ("read", node.attempt.path)][:4] == [node.attempt.path, "read"] * 2


# --- what a node has --------------------------------------------------------------------------------------------


def test_versions_are_those_of_what_runs(make_context: MakeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = measure_all(make_context(preflight=only_checks("versions")))["versions"]
    assert facts["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert (facts["torch"], facts["slurmtrain"]) == (torch.__version__, slurmtrain.__version__)
    assert facts.keys() == {"python", "torch", "cuda", "nccl", "driver", "slurmtrain"}
    monkeypatch.setattr(gpus, "load_nvml", lambda: "nvml")
    monkeypatch.setattr(gpus, "driver_version", lambda nvml: f"570 by {nvml}")
    versions = {"torch": "2.13.0+cu128", "cuda": "12.8", "nccl": "2.28.3"}
    monkeypatch.setattr(measure, "torch_versions", lambda: versions)
    facts = measure_all(make_context(preflight=only_checks("versions"), gpus=2))["versions"]
    assert (facts["cuda"], facts["nccl"], facts["driver"]) == ("12.8", "2.28.3", "570 by nvml")


def test_free_space_is_what_an_ordinary_user_may_use(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = []
    filesystem = SimpleNamespace(f_bavail=100, f_bfree=999, f_frsize=4096, f_favail=7, f_ffree=99, f_files=1000)
    monkeypatch.setattr(os, "statvfs", lambda path: paths.append(str(path)) or filesystem)
    node = make_context(preflight=only_checks("disk", "tmp", "shm"))
    facts = measure_all(node)
    assert {name: facts[name]["path"] for name in ("disk", "tmp", "shm")} == {
        "disk": str(node.attempt.run.path), "tmp": node.environ["TMPDIR"], "shm": "/dev/shm",
    }  # fmt: skip
    assert sorted(paths) == sorted(facts[name]["path"] for name in ("disk", "tmp", "shm"))
    assert (facts["disk"]["free"], facts["disk"]["inodes"], facts["disk"]["writable"]) == (409600, 7, True)
    # One that counts no inodes has none to run out of.
    filesystem.f_favail = filesystem.f_files = 0
    assert measure_all(make_context(preflight=only_checks("disk")))["disk"]["inodes"] is None


# --- GPUs and stragglers ----------------------------------------------------------------------------------------


@pytest.fixture
def gpu_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Stand in for the look at two GPUs, and note how often it is made."""
    calls: list[tuple[Any, ...]] = []

    def inspect(*arguments: Any) -> dict[str, Any]:
        calls.append(arguments)
        return {"gemm": {"gpus": [{"gpu": 0, "ms": 0.2}, {"gpu": 1, "ms": 0.5}, {"gpu": 2, "error": "no"}]}}

    monkeypatch.setattr(gpus, "inspect_gpus", inspect)
    monkeypatch.setattr(gpus, "load_nvml", lambda: None)
    return calls


def test_gpus_are_inspected_once_for_both_checks(make_context: MakeContext, gpu_calls: list[tuple[Any, ...]]) -> None:
    node = make_context(preflight=only_checks("gpu", "straggler", timeout_s=20.0), gpus=2, nodes=2)
    facts = measure_all(node)
    assert gpu_calls == [(2, node.environ, 18.0, None)]
    assert facts["gpu"]["gemm"]["gpus"][0] == {"gpu": 0, "ms": 0.2}
    assert facts["straggler"] == {"seconds": 0.0005}


def test_without_gpus_a_cpu_core_is_timed(make_context: MakeContext, gpu_calls: list[tuple[Any, ...]]) -> None:
    facts = measure_all(make_context(preflight=only_checks("gpu", "straggler"), nodes=2))
    assert gpu_calls == []
    assert facts["gpu"] == {"skip": "no GPUs requested"}
    assert facts["straggler"]["seconds"] > 0


# --- plug-ins ---------------------------------------------------------------------------------------------------


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Offer these functions as plug-ins, by name."""

    def put(**functions: Callable[[Any], Any]) -> None:
        points = [
            SimpleNamespace(name=name, value=f"site:{name}", dist=SimpleNamespace(name="site"), load=lambda f=f: f)
            for name, f in functions.items()
        ]
        monkeypatch.setattr(measure, "declared", lambda group: points)

    return put


def test_a_plug_in_is_a_check_of_its_own(make_context: MakeContext, offer: Callable[..., None]) -> None:
    arguments = []

    def check(node: Any) -> tuple[str, str]:
        arguments.append(replace(node, params=dict(node.params)))
        node.params.update(lr=9)
        return "pass", "3 left"

    offer(licence=check)
    node = make_context(preflight=only_checks(), node=1, nodes=2, gpus=4)
    assert measure_all(node) == {"licence": {"status": "pass", "summary": "3 left", "evidence": {}}}
    facts = arguments[0]
    assert (facts.index, facts.nodes, facts.host, facts.executor) == (1, 2, "node0", "slurm")
    assert (facts.run_dir, facts.params, facts.gpus_per_node) == (node.attempt.run.path, {"lr": 0.1}, 4)
    # It has changed a copy of its own.
    assert node.plan.spec.params == {"lr": 0.1}


def test_a_plug_in_that_raises_or_hangs_delays_no_other(
    make_context: MakeContext, offer: Callable[..., None], hanging: Callable[..., Any]
) -> None:
    offer(bad=lambda node: {}["x"], slow=hanging, good=lambda node: ("pass", "well"), exits=lambda node: sys.exit(1))
    facts = measure_all(make_context(preflight=only_checks(timeout_s=1.0)))
    assert facts == {
        "bad": {"error": "KeyError: 'x'"},
        "slow": {"timeout": 1.0},
        "good": {"status": "pass", "summary": "well", "evidence": {}},
        "exits": {"error": "SystemExit: 1"},
    }


# --- checks that other packages bring along -----------------------------------------------------------------------

PAGE = Path(__file__).resolve().parents[5] / "docs" / "preflight.md"
OWN_PLUGINS = {"disk", "gpu"}

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a package with entry points, ``name=module:callable``, and a module of this text."""

    def put(package: str, *points: str, module: str = "sitecheck", text: str = "") -> Path:
        place = tmp_path / package
        metadata = place / f"{package}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = "\n".join([f"[{measure.GROUP}]", *(point.replace("=", " = ", 1) for point in points)])
        (metadata / "entry_points.txt").write_text(lines + "\n")
        (place / f"{module}.py").write_text(text)
        monkeypatch.syspath_prepend(str(place))
        monkeypatch.delitem(sys.modules, module, raising=False)
        return place

    return put


def node(**changes: object) -> CheckedNode:
    values: dict[str, object] = {
        "index": 1,
        "nodes": 4,
        "host": "node1",
        "executor": "slurm",
        "run_dir": Path("/runs/x"),
        "params": {"lr": 0.1},
        "gpus_per_node": 8,
    }
    return CheckedNode(**{**values, **changes})  # type: ignore[arg-type]


def point(text: str, install: Install) -> EntryPoint:
    """An entry point whose callable ``check`` is defined by this text."""
    install("site-checks", "licence=sitecheck:check", text=text)
    points, _, _ = find_plugins({}, OWN_PLUGINS)
    return points["licence"]


# --- which there are --------------------------------------------------------------------------------------------


def test_a_check_is_not_loaded_to_be_found_and_one_that_is_off_need_not_be_installed(install: Install) -> None:
    assert find_plugins({"licence": "off"}, OWN_PLUGINS) == ({}, {}, "")
    install("site-checks", "licence=sitecheck:check", text="raise SystemExit('loaded')")
    assert find_plugins({"licence": "off"}, OWN_PLUGINS) == ({}, {}, "")
    find_plugins({}, OWN_PLUGINS)
    assert "sitecheck" not in sys.modules


@pytest.mark.parametrize("level", ["warn", "fail"])
def test_a_level_for_a_check_that_is_not_installed_is_an_error(level: str) -> None:
    points, facts, clashes = find_plugins({"licence": level}, OWN_PLUGINS)
    assert facts == {"licence": {"error": "no such entry point of the group 'slurmtrain.checks'"}}
    assert (points, clashes) == ({}, "")


def test_a_name_of_slurmtrains_own_is_refused_with_the_package(install: Install) -> None:
    install("site-checks", "disk=sitecheck:check", "licence=sitecheck:check")
    points, facts, clashes = find_plugins({}, OWN_PLUGINS)
    assert points.keys() == {"licence"}
    assert facts == {}
    assert clashes == "the entry point 'disk' of site-checks has the name of a built-in check; rename it"


def test_one_name_in_two_packages_is_refused_with_both(install: Install) -> None:
    install("site-checks", "licence=sitecheck:check")
    install("lab-checks", "licence=labcheck:check", module="labcheck")
    points, facts, _ = find_plugins({}, OWN_PLUGINS)
    assert points == {}
    assert facts["licence"]["error"] == "several packages have a check of this name: lab-checks, site-checks"


# --- what they say ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "finding"),
    [
        ("'warn', f'{node.host} of {node.nodes}'", ("warn", "node1 of 4", {})),
        ("'fail', 'none left', {'left': 0, 'asked': (1, 2)}", ("fail", "none left", {"left": 0, "asked": [1, 2]})),
        # One line of a bounded length.
        ("'pass', 'a\\n  b ' + 'c' * 9999", ("pass", f"a b {'c' * 496}", {})),
    ],
)
def test_a_check_returns_status_summary_and_evidence(
    install: Install, returned: str, finding: tuple[object, ...]
) -> None:
    check = point(f"def check(node): return {returned}", install)
    assert run_plugin(check, node()) == dict(zip(("status", "summary", "evidence"), finding, strict=True))


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ("None", "returned None, not"),
        ("'pass'", "not \\(status, summary"),
        ("('pass',)", "not \\(status, summary"),
        ("('pass', 'a', {}, 1)", "not \\(status, summary"),
        ("['pass', 'a']", "not \\(status, summary"),
        ("('fine', 'a')", "the status 'fine'; use one of skip, pass, warn, fail"),
        ("([], 'a')", "the status \\[\\]"),
        ("('pass', 3)", "a summary that is not text"),
        ("('pass', 'a', [1])", "evidence that is not a mapping"),
        ("('pass', 'a', {'x': object()})", "not JSON serializable"),
        ("('pass', 'a', {'x': float('nan')})", "not JSON compliant"),
    ],
)
def test_anything_else_that_a_check_returns_is_an_error(install: Install, returned: str, reason: str) -> None:
    check = point(f"def check(node): return {returned}", install)
    with pytest.raises((TypeError, ValueError), match=reason):
        run_plugin(check, node())


@pytest.mark.parametrize(
    "text", ["raise ImportError('no')", "def other(node): pass", "def check(node): raise OSError('no')"]
)
def test_an_exception_of_a_check_is_raised(install: Install, text: str) -> None:
    with pytest.raises((ImportError, AttributeError, OSError)):
        run_plugin(point(text, install), node())


# --- the page ---------------------------------------------------------------------------------------------------


def test_the_example_of_the_page_runs(install: Install, tmp_path: Path) -> None:
    text = PAGE.read_text()
    block = dict(re.findall(r"^```(python|toml)\n(.*?)^```$", text, re.M | re.S))
    points = tomllib.loads(block["toml"])["project"]["entry-points"][measure.GROUP]
    ((name, value),) = points.items()
    module = value.partition(":")[0]
    install("site-checks", f"{name}={value}", module=module, text=block["python"])
    importlib.invalidate_caches()
    points, _, _ = find_plugins({}, OWN_PLUGINS)
    assert run_plugin(points[name], node(params={}))["status"] == "skip"
    assert run_plugin(points[name], node(params={"data": str(tmp_path)}))["status"] == "pass"
    missing = run_plugin(points[name], node(params={"data": str(tmp_path / "nothing")}))
    assert (missing["status"], missing["evidence"]) == ("fail", {"path": str(tmp_path / "nothing")})


def test_the_page_names_every_attribute_of_a_node() -> None:
    text = PAGE.read_text()
    assert [name for name in CheckedNode.__dataclass_fields__ if f"`{name}`" not in text] == []
