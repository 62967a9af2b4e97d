"""What ``slurmtrain scale`` prints of runs that are known, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers.browser import browser
from helpers.queried_runs import SWEEP, write_run
from helpers.rare import rare
from helpers.workspaces import make_workspace
from unit.cli.test_cli_compare import call
from unit.ops.query.test_ops_performance import trained

ESCAPED = "</script><script>alert(1)</script>"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with one, two and four processes, with two strategies, and one that has not begun."""
    workspace = make_workspace(tmp_path_factory.mktemp("scale") / "runs")
    number = 0
    for strategy, step_s in (("ddp", 1.0), ("fsdp", 1.2)):
        for ranks in (1, 2, 4):
            number += 1
            facts = {"spec": {"strategy": strategy}, "params": {"batch_size": 8}, "sweep": SWEEP}
            trained(workspace, number, "cnn", ranks, 0.1 + step_s / ranks, **facts).ended("completed")
    write_run(workspace, 9, "waiting", state="pending", params={"batch_size": 8, "text": ESCAPED})
    return workspace.root.path


def test_the_tables_of_any_runs_are_printed_with_the_figures_of_compare(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(root, capsys, "scale", SWEEP)
    assert code == 0
    assert [line for line in out.splitlines() if line in ("Scaling", "Strategies", "Hardware")] == [
        "Scaling",
        "Strategies",
    ]
    assert re.search(r"^ddp: 4 processes: 0\.79 efficient; more than 8 cost more than they save", out, re.M)
    assert re.search(r"^fsdp: a step takes 0\.1 s \+ 1\.2 s / n \+ \S+ s \* log2 n \(Amdahl's law\)", out, re.M)
    assert err.startswith("no utilization for 6 of 6 runs: ")
    compared = json.loads(call(root, capsys, "compare", SWEEP, "--performance", "--json")[1])["runs"]
    answer = json.loads(call(root, capsys, "scale", SWEEP, "--json")[1])
    same = {run["id"]: run for run in compared}
    for run in answer["runs"]:
        assert {name: run[name] for name in same[run["id"]] if name in run and name != "speedup"} == {
            name: value for name, value in same[run["id"]].items() if name in run and name != "speedup"
        }
    # Against the smallest of their own series.
    assert [round(run["speedup"], 3) for run in answer["runs"]] == [1.0, 1.833, 3.143, 1.0, 1.857, 3.25]
    assert len(answer["strategies"]) == 6


def test_a_page_has_the_same_figures_and_no_element_of_a_parameter(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert call(root, capsys, "scale", SWEEP, "--html", str(page), "--json")[0] == 0
    text = page.read_text()
    facts = json.loads(re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', text, re.S)[1])  # type: ignore[index]
    answer = json.loads(call(root, capsys, "scale", SWEEP, "--json")[1])
    assert facts["kind"] == "scale"
    assert {name: facts[name] for name in answer} == answer
    assert facts["sentences"][0].startswith("ddp: 4 processes")
    call(root, capsys, "scale", "*", "--html", str(page))
    assert ESCAPED not in page.read_text()
    assert "alert(1)" in page.read_text()
    code, _, err = call(root, capsys, "scale", SWEEP, "--html", str(tmp_path / "none" / "page.html"))
    assert (code, "cannot write" in err, "name another file" in err) == (2, True, True)


@rare
def test_a_browser_shows_the_tables_and_the_law(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    call(root, capsys, "scale", SWEEP, "--html", str(page))
    answer = json.loads(call(root, capsys, "scale", SWEEP, "--json")[1])
    with browser(tmp_path) as chromium:
        chromium.open(page.as_uri())
        chromium.wait_for("return document.querySelectorAll('#speedup svg circle').length", lambda count: count == 6)
        cells = chromium.run(
            "return [...document.querySelectorAll('#sizes-table tbody tr')].map((row) => [...row.cells].map((cell) => "
            "cell.dataset.value))"
        )
        heads = chromium.run("return [...document.querySelectorAll('#sizes-table th')].map((each) => each.textContent)")
        assert [dict(zip(heads, row, strict=True))["id"] for row in cells] == [run["id"] for run in answer["runs"]]
        for row, run in zip(cells, answer["runs"], strict=True):
            shown = dict(zip(heads, row, strict=True))
            assert float(shown["speed-up"]) == run["speedup"]
            assert float(shown["steps/s"]) == run["steps_per_second"]
        chromium.run("[...document.querySelectorAll('#sizes-table th button')].find((each) => each.textContent === "
                     "'efficiency').click()")  # fmt: skip
        first = chromium.run("return document.querySelector('#sizes-table tbody tr').cells[0].textContent")
        assert first == max(answer["runs"], key=lambda run: run["efficiency"])["id"]
        assert chromium.complaints() == []
        assert chromium.requests() == [page.as_uri()]


def test_a_single_run_is_no_study(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(root, capsys, "scale", "0000000001")
    assert (code, out.splitlines()[-1]) == (0, "a single size says nothing about others: a study needs two at least")


def test_runs_that_have_not_begun_have_no_tables_and_the_next_command_is_named(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(root, capsys, "scale", "0000000009")
    assert (code, out) == (0, "")
    assert "study 0000000009 is not complete (1 run: 1 pending); 'slurmtrain scale 0000000009 --wait' waits" in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nobody"], "there is no run 'nobody'"),
        (["nobody.yaml", "--nodes", "1,2"], "nobody.yaml: this file does not exist"),
        ([SWEEP, "--nodes", "1,2"], "is not a spec, and only a spec can be run: leave --nodes out"),
        ([SWEEP, "params.lr=1", "--again"], "leave params.lr=1, --again out"),
        ([SWEEP, "--batch-key", "params.batch"], "the spec has no key 'params.batch'; did you mean"),
        ([SWEEP, "--json", "--markdown"], "--json and --markdown exclude each other"),
        (["x.yaml", "--nodes", "0,1"], "expected whole numbers of at least 1"),
        (["x.yaml", "--nodes", "2,2"], "has a number twice"),
        (["x.yaml", "--lr", "0.1"], "write params.lr=... to set a parameter"),
    ],
)
def test_bad_input_is_a_sentence(
    root: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    code, out, err = call(root, capsys, "scale", *words)
    assert (code, out) == (2, "")
    assert sentence in err


@pytest.mark.parametrize(
    ("text", "words", "sentence"),
    [
        (
            "sweep: {params.x: 'uniform(0, 1)', search: {metric: loss, mode: min, trials: 2}}",
            ["--nodes", "1,2"],
            "has a search",
        ),
        ("sweep: {points: [{params.x: 1}, {params.x: 2}]}", ["--nodes", "1,2"], "has 'sweep.points'"),
        ("", ["--nodes", "1"], "a study needs two points at least"),
        ("", ["--strategies", "ddp,fdsp"], "there is no strategy 'fdsp'; did you mean 'fsdp'?"),
        ("", ["--nodes", "1,2", "--strategies", "hsdp"], "a run of the study: strategy: 'hsdp' replicates the model"),
        ("resources: {gpu_per_node: 2}", ["--nodes", "1,2"], "did you mean"),
    ],
)
def test_what_no_study_can_be_made_of_is_a_sentence(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: list[str], sentence: str
) -> None:
    spec = tmp_path / "x.yaml"
    spec.write_text(f"name: x\ncommand: python -c pass\nparams: {{x: 0}}\n{text}\n")
    code, out, err = call(root, capsys, "scale", str(spec), *words, "--executor", "local")
    assert (code, out) == (2, "")
    assert sentence in err
    assert "points=[" not in err


def test_a_study_is_previewed(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "x.yaml"
    spec.write_text("name: x\ncommand: python -c pass\nparams: {batch_size: 8}\nsweep: {params.batch_size: [8, 16]}\n")
    code, out, _ = call(root, capsys, "scale", str(spec), "--nodes", "1,2", "--dry-run", "--executor", "local")
    assert code == 0
    assert len(re.findall(r"^\d", out.partition("\n\n")[0], re.M)) == 4
