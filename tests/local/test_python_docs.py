"""The page about Python and its notebook: their code runs, and mypy finds nothing in it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.site import PATIENCE_S, Site

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "python.md"
NOTEBOOK = DOCS / "analysis.ipynb"
_BLOCK = re.compile(r"^```python(?: file=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def notebook() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(NOTEBOOK.read_text())
    return content


def code_of_the_page() -> str:
    return "\n".join(text for name, text in _BLOCK.findall(PAGE.read_text()) if not name)


def code_of_the_notebook() -> str:
    """Its cells. As in Jupyter, the last line of a cell may be a value that is shown: here it is printed."""
    cells = ["".join(cell["source"]).splitlines() for cell in notebook()["cells"] if cell["cell_type"] == "code"]
    for lines in cells:
        if re.fullmatch(r"[\w.()]+", lines[-1]):
            lines[-1] = f"print({lines[-1]})"
    return "\n".join(line for lines in cells for line in lines)


def run_code(site: Site, code: str) -> str:
    completed = subprocess.run(
        [sys.executable, "-W", "error::slurmtrain.errors.SlurmtrainWarning", "-c", code],
        cwd=site.path,
        env={**site.environment(), "MPLBACKEND": "Agg"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def test_the_code_of_the_page_and_of_the_notebook_runs(site: Site) -> None:
    pytest.importorskip("pandas", reason="the extra pandas is not installed")
    for name, text in _BLOCK.findall(PAGE.read_text()):
        if name:
            (site.path / name).write_text(text)
    # Without MLflow, whose import and first store take longer than all the rest.
    code, untracked = code_of_the_page(), '"tracking": {"mlflow": {"enabled": False}, '
    assert code.count('"tracking": {') == 1
    printed = run_code(site, code.replace('"tracking": {', untracked)).splitlines()
    assert printed[:2] == ["0.05 completed 0.014781", "0.3 completed 0.0"]
    assert "20/20 steps, 0 lost, goodput 0." in "\n".join(printed)
    assert "rank 0 step 20/20 loss 0.000000" in printed
    assert "there is no run 'no-such-run'" in printed[-1]
    [best] = site.json("status", "--where", "tags = best")["runs"]
    assert (best["state"], best["params"]["lr"], best["attempt"]) == ("completed", 0.2, 2)
    shown = run_code(site, code_of_the_notebook())
    assert "step 20/20 loss" in shown
    assert best["id"] in shown


def test_the_notebook_is_one_without_outputs() -> None:
    content = notebook()
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert content["metadata"]["kernelspec"]["name"] == "python3"
    names = [cell["id"] for cell in content["cells"]]
    assert len(set(names)) == len(names)
    for cell in content["cells"]:
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell["id"])
        assert cell["cell_type"] in ("markdown", "code")
        assert isinstance(cell["source"], list)
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)


@pytest.mark.parametrize("source", [code_of_the_page, code_of_the_notebook], ids=["page", "notebook"])
def test_mypy_finds_nothing_in_the_examples(source: Any, tmp_path: Path) -> None:
    path = tmp_path / "example.py"
    path.write_text(source())
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", "pyproject.toml", str(path)]
    checked = subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True, timeout=PATIENCE_S)
    assert checked.returncode == 0, checked.stdout + checked.stderr
