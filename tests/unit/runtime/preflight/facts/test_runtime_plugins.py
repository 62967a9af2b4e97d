"""Checks that other packages bring along."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from slurmtrain.runtime.preflight.facts import network_plugins
from slurmtrain.runtime.preflight.facts.network_plugins import CheckedNode, find_plugins, run_plugin

PAGE = Path(__file__).resolve().parents[5] / "docs" / "preflight.md"
OWN = {"disk", "gpu"}

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a package with entry points, ``name=module:callable``, and a module of this text."""

    def put(package: str, *points: str, module: str = "sitecheck", text: str = "") -> Path:
        place = tmp_path / package
        metadata = place / f"{package}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = "\n".join([f"[{network_plugins.GROUP}]", *(point.replace("=", " = ", 1) for point in points)])
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
    points, _, _ = find_plugins({}, OWN)
    return points["licence"]


# --- which there are --------------------------------------------------------------------------------------------


def test_an_installed_check_is_found_by_the_name_of_its_entry_point(install: Install) -> None:
    install("site-checks", "licence=sitecheck:check", "scratch=sitecheck:other")
    points, facts, clashes = find_plugins({}, OWN)
    assert points.keys() == {"licence", "scratch"}
    assert (facts, clashes) == ({}, "")


def test_a_check_is_not_loaded_to_be_found_and_one_that_is_off_need_not_be_installed(install: Install) -> None:
    assert find_plugins({"licence": "off"}, OWN) == ({}, {}, "")
    install("site-checks", "licence=sitecheck:check", text="raise SystemExit('loaded')")
    assert find_plugins({"licence": "off"}, OWN) == ({}, {}, "")
    find_plugins({}, OWN)
    assert "sitecheck" not in sys.modules


@pytest.mark.parametrize("level", ["warn", "fail"])
def test_a_level_for_a_check_that_is_not_installed_is_an_error(level: str) -> None:
    points, facts, clashes = find_plugins({"licence": level}, OWN)
    assert facts == {"licence": {"error": "no such entry point of the group 'slurmtrain.checks'"}}
    assert (points, clashes) == ({}, "")


def test_a_name_of_slurmtrains_own_is_refused_with_the_package(install: Install) -> None:
    install("site-checks", "disk=sitecheck:check", "licence=sitecheck:check")
    points, facts, clashes = find_plugins({}, OWN)
    assert points.keys() == {"licence"}
    assert facts == {}
    assert clashes == "the entry point 'disk' of site-checks has the name of a check of slurmtrain's own"


def test_one_name_in_two_packages_is_refused_with_both(install: Install) -> None:
    install("site-checks", "licence=sitecheck:check")
    install("lab-checks", "licence=labcheck:check", module="labcheck")
    points, facts, _ = find_plugins({}, OWN)
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


def test_a_check_cannot_change_the_node(install: Install) -> None:
    check = point("def check(node): node.index = 0", install)
    with pytest.raises(AttributeError):
        run_plugin(check, node())


# --- the page ---------------------------------------------------------------------------------------------------


def test_the_example_of_the_page_runs(install: Install, tmp_path: Path) -> None:
    text = PAGE.read_text()
    block = dict(re.findall(r"^```(python|toml)\n(.*?)^```$", text, re.M | re.S))
    points = tomllib.loads(block["toml"])["project"]["entry-points"][network_plugins.GROUP]
    ((name, value),) = points.items()
    module = value.partition(":")[0]
    install("site-checks", f"{name}={value}", module=module, text=block["python"])
    importlib.invalidate_caches()
    points, _, _ = find_plugins({}, OWN)
    assert run_plugin(points[name], node(params={}))["status"] == "skip"
    assert run_plugin(points[name], node(params={"data": str(tmp_path)}))["status"] == "pass"
    missing = run_plugin(points[name], node(params={"data": str(tmp_path / "nothing")}))
    assert (missing["status"], missing["evidence"]) == ("fail", {"path": str(tmp_path / "nothing")})


def test_the_page_names_every_attribute_of_a_node() -> None:
    text = PAGE.read_text()
    assert [name for name in CheckedNode.__dataclass_fields__ if f"`{name}`" not in text] == []
