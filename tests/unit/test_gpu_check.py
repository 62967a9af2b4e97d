"""``scripts/gpu-check``, as far as it can be tried without a GPU: what it asks, chooses, installs and writes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from helpers.gpu_figures import Figures
from helpers.script_modules import SCRIPTS, load_script

SCRIPT = SCRIPTS / "gpu-check"
FACTS = {"python": "3.12.3", "torch": "2.11.0+cu130", "cuda": "13.0", "nccl": "2.28.9", "paths": []}
GPUS = {**FACTS, "gpus": ["NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"]}
REPORT = """<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite name="pytest" tests="4">
<testcase classname="tests.gpu" name="test_one"/><testcase classname="tests.gpu" name="test_two"/>
<testcase name="test_three"><failure message="AssertionError">...</failure></testcase>
<testcase name="test_four"><skipped type="pytest.skip" message="needs two CUDA devices">...</skipped></testcase>
<testcase name="test_five"><error message="no fixture">...</error></testcase></testsuite></testsuites>"""


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return load_script("gpu-check")


def test_arguments_that_it_does_not_know_are_pytests(check: ModuleType) -> None:
    arguments = check.parse(["--no-fault", "-k", "restore", "--output", "w", "-x"])
    assert arguments.no_fault
    assert arguments.output == Path("w")
    assert arguments.pytest == ["-k", "restore", "-x"]


def test_the_python_that_was_named_comes_first_and_none_twice(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(check, "ROOT", tmp_path)
    assert check.pythons({"SLURMTRAIN_PYTHON": "/opt/python"}) == ["/opt/python", sys.executable]
    assert check.pythons({"SLURMTRAIN_PYTHON": sys.executable}) == [sys.executable]
    venv = tmp_path / ".venv" / "bin" / "python"
    venv.parent.mkdir(parents=True)
    venv.touch()
    assert check.pythons({}) == [sys.executable, str(venv)]


def test_a_python_says_which_torch_and_packages_it_has(check: ModuleType) -> None:
    facts = check.probe(sys.executable)
    assert facts["torch"]
    assert "gpus" in facts or "sees no CUDA device" in facts["problem"]
    assert any(path.endswith("site-packages") for path in facts["paths"])
    assert "does not answer" in check.probe("/no/such/python")["problem"]


def test_without_a_gpu_it_says_why_and_runs_nothing(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "pythons", lambda environ: ["a", "b"])
    monkeypatch.setattr(check, "probe", lambda python: {"problem": f"{python} has no torch"})
    monkeypatch.setattr(check, "prepare", lambda *_: pytest.fail("nothing is to be installed"))
    assert check.main([]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "gpu-check: skipped: a: a has no torch",
        "gpu-check: skipped: b: b has no torch",
    ]


def test_torch_and_mlflow_are_never_installed(check: ModuleType) -> None:
    required = check.requirements()
    names = [re.match(r"[\w-]+", each)[0] for each in required]
    assert {"torch", "mlflow"}.isdisjoint(names)
    assert {"omegaconf", "sqlalchemy", "submitit", "pytest", "nvidia-ml-py"} <= set(names)
    assert len(names) == len(set(names))


def test_an_environment_with_all_requirements_is_used_as_it_is(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "has_all", lambda python: True)
    assert check.prepare("/usr/bin/python3", []) == "/usr/bin/python3"


def test_the_outcome_of_each_test_is_counted(check: ModuleType) -> None:
    outcome = check.read_outcome(REPORT)
    assert outcome.passed == 2
    assert outcome.failed == 2
    assert outcome.skipped == {"needs two CUDA devices": 1}


def test_the_table_names_machine_software_figures_and_what_was_skipped(check: ModuleType, tmp_path: Path) -> None:
    figures = Figures()
    figures.add("stall of a save", 0.012345, "s")
    figures.add("matrix product", 789.4, "TFLOP/s")
    figures.write(tmp_path / "figures")
    assert check.read_figures(tmp_path / "missing") == []
    rows, outcome = check.read_figures(tmp_path / "figures"), check.read_outcome(REPORT)
    table = check.make_table(GPUS, "580.1", rows, outcome, 321.4)
    assert re.match(
        r"\d{4}-\d\d-\d\d, 2 x NVIDIA H100 80GB HBM3, driver 580.1; Python 3.12.3, torch 2.11.0\+cu130", table
    )
    assert "2 tests passed in 321 s, 2 failed, 1 were skipped." in table
    assert "| stall of a save | 0.0123 s |\n| matrix product | 789 TFLOP/s |" in table
    assert table.endswith("Skipped:\n\n- needs two CUDA devices\n")


def test_only_the_table_of_the_page_is_replaced_however_often(check: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    page.write_text(f"# Before\n\n{check.BEGIN}\nold\n\n{check.END}\nafter\n")
    for table in ("first\n", "second\n"):
        check.write_table(page, table, page)
    assert page.read_text() == f"# Before\n\n{check.BEGIN}\nsecond\n\n{check.END}\nafter\n"


def test_the_page_of_this_repository_has_a_place_for_the_table(check: ModuleType, tmp_path: Path) -> None:
    check.write_table(check.PAGE, "figures\n", tmp_path / "copy.md")
    assert "figures" in (tmp_path / "copy.md").read_text()
    with pytest.raises(ValueError, match="has no lines"):
        check.write_table(SCRIPT.parent / "test", "figures\n", tmp_path / "copy.md")
