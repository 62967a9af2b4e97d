"""What runs cost, as commands print it; the figures themselves are those of test_model_costs.py."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.charged_runs import preempted_run
from helpers.queried_runs import write_run
from helpers.workspaces import make_workspace

from slurmtrain.cli import main

PRICES = """
prices:
  currency: EUR
  partitions:
    spot: {node_hour: 8}
    ondemand: {node_hour: 12}
    local: {node_hour: 0.5}
  on_demand: ondemand
"""
DOCS = Path(__file__).resolve().parents[3] / "docs" / "cost.md"
SWEEP = "00000000sw"
# What the run of the helper costs, in hours on two nodes.
HOURS = (60 + 30 + 8005 + 3285) / 3600
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runs root with prices: two runs of a sweep that were preempted, and an archived one of this machine."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slurmtrain.yaml").write_text(PRICES)
    workspace = make_workspace(tmp_path / "runs")
    for number in (1, 2):
        # The second began a day later.
        now = 1000.0 + 86_400 * (number - 1)
        preempted_run(workspace.root.run(f"{number:010d}"), now, sweep=SWEEP, executor="slurm")
    write_run(workspace, 3, "here", archived=True, state="completed", resources={"gpus_per_node": 2})
    return tmp_path


@pytest.fixture
def run(root: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command: its exit code, standard output and standard error."""

    def command(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(["--runs", str(root / "runs"), *arguments])
        printed = capsys.readouterr()
        return int(end.value.code or 0), printed.out, printed.err

    return command


def shown_in_docs(first: str, *, inclusive: bool = False) -> list[str]:
    """The lines of the block on the page that begins with a line: after it, or from it on."""
    lines = DOCS.read_text().splitlines()
    begin = lines.index(first) + (not inclusive)
    return lines[begin : lines.index("```", begin)]


def test_cost_of_a_run_says_where_its_money_went_and_when_on_demand_pays(run: Run, root: Path) -> None:
    (root / "slurmtrain.yaml").write_text("\n".join(shown_in_docs("prices:", inclusive=True)))
    code, out, err = run("cost", "0000000001")
    assert (code, err) == (0, "")
    assert [line.rstrip() for line in out.splitlines()] == [
        line.replace("6am5hhj838", "0000000001") for line in shown_in_docs("$ slurmtrain cost gpt")
    ]


def test_cost_and_show_have_the_same_figures(run: Run) -> None:
    spending = json.loads(run("cost", "0000000001", "--json")[1])
    shown = json.loads(run("show", "0000000001", "--json")[1])["run"]["cost"]
    assert spending["total"] == shown
    [listed] = spending["runs"]
    assert {name: listed[name] for name in shown} == shown
    assert shown["spent"] == pytest.approx(16 * HOURS)
    line = next(line for line in run("show", "0000000001")[1].splitlines() if line.startswith("cost"))
    assert line == ("cost        50.58 EUR, 14.60 lost to 3 interruptions, 0.13 saving, 0.27 starting, on demand 53.97")


def test_the_cost_of_a_sweep_is_the_sum_of_its_runs(run: Run) -> None:
    spending = json.loads(run("cost", SWEEP, "--json")[1])
    assert [each["id"] for each in spending["runs"]] == ["0000000001", "0000000002"]
    for name in ("spent", "lost", "saving", "starting", "training", "on_demand", "saved_by_spot", "waiting_seconds"):
        assert spending["total"][name] == pytest.approx(sum(each[name] for each in spending["runs"])), name
    assert spending["total"]["interruptions_by_cause"] == {"preempted": 6}
    # Twice the same: an interruption costs what it cost each of them.
    for name in ("cost_of_interruption", "break_even_interruptions_per_hour", "interruptions_per_hour"):
        assert spending["total"][name] == pytest.approx(spending["runs"][0][name])
    _, out, _ = run("cost", SWEEP)
    assert out.splitlines()[0] == "2 runs: 101.16 EUR"
    # Both days, since they differ; one partition and one state are no groups.
    assert [line.split()[0] for line in out.splitlines() if line.startswith("1970")] == ["1970-01-01", "1970-01-02"]
    assert not any(line.startswith(("PARTITION", "STATE")) for line in out.splitlines())


def test_without_names_all_runs_count_also_archived_ones_by_what_they_have_in_common(run: Run) -> None:
    spending = json.loads(run("cost", "--json")[1])
    assert [each["id"] for each in spending["runs"]] == ["0000000001", "0000000002", "0000000003"]
    by_partition = {each["partition"]: each["spent"] for each in spending["by"]["partition"]}
    assert list(by_partition) == ["local", "spot"]
    assert by_partition["spot"] == pytest.approx(32 * HOURS)
    assert sum(by_partition.values()) == pytest.approx(spending["total"]["spent"])
    for kind in ("day", "state"):
        assert sum(each["spent"] for each in spending["by"][kind]) == pytest.approx(spending["total"]["spent"])
    assert [each["id"] for each in json.loads(run("cost", "--since", "1w", "--json")[1])["runs"]] == ["0000000003"]
    chosen = json.loads(run("cost", "--where", "sweep = 00000000sw", "--json")[1])
    assert [each["id"] for each in chosen["runs"]] == ["0000000001", "0000000002"]
    # The dearest first, as text.
    lines = run("cost")[1].splitlines()
    assert [line.split()[0] for line in lines if line.startswith("00")][-1] == "0000000003"


def test_csv_has_a_line_for_each_run_with_all_digits(run: Run) -> None:
    rows = list(csv.DictReader(io.StringIO(run("cost", "--csv")[1])))
    listed = json.loads(run("cost", "--json")[1])["runs"]
    assert [float(row["spent"]) for row in rows] == [each["spent"] for each in listed]
    assert rows[0]["currency"] == "EUR"
    assert rows[2]["break_even_interruptions_per_hour"] == ""


def test_costs_are_fields_to_sort_filter_and_compare_by(run: Run) -> None:
    columns = ("--columns", "id,cost.spent,cost.unit", "--all")
    _, out, _ = run("status", *columns, "--sort", "-cost.spent", "--limit", "1")
    assert out.splitlines()[1].split() == ["0000000002", "50.58", "EUR"]
    _, out, _ = run("status", *columns, "--where", "cost.lost > 10", "--csv")
    assert [row["id"] for row in csv.DictReader(io.StringIO(out))] == ["0000000001", "0000000002"]
    assert json.loads(run("best", SWEEP, "--by", "cost.spent", "--json")[1])["by"] == "cost.spent"
    compared = json.loads(run("compare", SWEEP, "--metrics", "cost.lost", "--json")[1])
    assert [each["metrics"]["cost.lost"]["last"] for each in compared["runs"]] == [pytest.approx(14.6)] * 2
    # It is no field of lists that nobody asked for: all runs would have to be read.
    assert "cost" not in json.loads(run("status", "--json")[1])["runs"][0]


def test_without_prices_costs_are_hours(run: Run, root: Path) -> None:
    (root / "slurmtrain.yaml").write_text("")
    code, out, err = run("cost", "0000000001")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "run 0000000001 (gpt): 25.3 GPU-hours"
    assert "on demand" not in out
    total = json.loads(run("cost", "0000000001", "--json")[1])["total"]
    assert (total["currency"], total["unit"], total["problem"]) == (None, "GPU-hours", None)
    assert total["spent"] == total["gpu_hours"] == pytest.approx(8 * HOURS)
    # Hours of nodes and of GPUs do not add up.
    workspace = make_workspace(root / "runs")
    write_run(workspace, 4, "plain", state="completed")
    _, out, err = run("cost", "0000000001", "plain")
    assert out.splitlines()[0] == "2 runs: 25.3 GPU-hours"
    assert err.startswith("warning: 1 run without GPUs, with ")
    assert err.endswith(" node-hours, is not in the sum\n")


def test_runs_without_a_price_are_named_and_are_in_no_sum(run: Run, root: Path) -> None:
    (root / "slurmtrain.yaml").write_text("prices: {currency: CHF, partitions: {local: {node_hour: 3}}}\n")
    missing = "partition spot has no price: prices.partitions.spot"
    code, out, err = run("cost", "0000000001")
    assert (code, out.splitlines()[0]) == (0, "run 0000000001 (gpt): 25.3 GPU-hours")
    assert err == f"warning: {missing}\n"
    _, out, err = run("cost")
    assert out.splitlines()[0].startswith("3 runs: <0.001 CHF") or out.splitlines()[0].startswith("3 runs: 0.0")
    assert err == f"warning: 2 runs with 50.6 GPU-hours are not in the sum: {missing}\n"
    spending = json.loads(run("cost", "--json")[1])
    assert spending["total"]["spent"] == spending["runs"][2]["spent"]
    [unpriced] = spending["unpriced"]
    assert (unpriced["problem"], unpriced["runs"]) == (missing, 2)
    shown = json.loads(run("show", "0000000001", "--json")[1])["run"]["cost"]
    assert (shown["currency"], shown["problem"]) == (None, missing)
    assert f"({missing})" in run("show", "0000000001")[1].replace("\n            ", " ")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nothing"], "there is no run 'nothing'"),
        (["--where", "state = failed"], "there are no such runs"),
        (["--where", "stat = failed"], "none of these runs has a field 'stat'"),
        (["--since", "soon"], "'soon' is not a time"),
        (["--csv", "--json"], "--csv and --json exclude each other"),
    ],
)
def test_a_question_that_has_no_answer_is_a_sentence(run: Run, arguments: list[str], sentence: str) -> None:
    code, out, err = run("cost", *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("prices", "sentence"),
    [
        ("3", "slurmtrain.yaml:1: prices: expected a section (key: value), found a whole number (3)"),
        ("{currency: EUR}", "slurmtrain.yaml:1: prices.partitions: this key is required"),
        ("{partitions: {a: {node_hour: 1}}}", "slurmtrain.yaml:1: prices.currency: this key is required"),
        ("\n  currency: EUR\n  partitions:\n    a: {node_hour: -1}", ":4: prices.partitions.a.node_hour: expected a"),
        ("\n  currency: EUR\n  partitions:\n    a: {}", ":4: prices.partitions.a: there is no price"),
        ("\n  currency: EUR\n  partitions:\n    a: {gpu_hour: {}}", ":4: prices.partitions.a.gpu_hour: there is no"),
        ("\n  currency: EUR\n  partitions:\n    a: {gpu_hour: x}", "a.gpu_hour: expected a number, found text ('x')"),
        ("\n  currency: EUR\n  partitions:\n    a: {gpu_hour: {'h 1': 3}}", "expected a type of GPUs as your site"),
        ("\n  currency: EUR\n  partitions:\n    a: {gpu_hours: 3}", "unknown key; did you mean 'gpu_hour'?"),
        ("\n  currency: EUR\n  partitions:\n    'a,b': {gpu_hour: 3}", "expected the name of a partition, found 'a,b'"),
        ("\n  currency: the euro\n  partitions: {a: {node_hour: 1}}", "expected a currency, such as EUR"),
        ("\n  currency: EUR\n  partitions: {a: {node_hour: .nan}}", "expected a number of at least 0"),
        (
            "\n  currency: EUR\n  partitions: {ondemand: {node_hour: 1}}\n  on_demand: on-demand",
            ":4: prices.on_demand: there is no price of partition 'on-demand' in prices.partitions; did you mean",
        ),
    ],
)  # fmt: skip
def test_wrong_prices_are_mistakes_with_their_line(run: Run, root: Path, prices: str, sentence: str) -> None:
    (root / "slurmtrain.yaml").write_text(f"prices: {prices}\n")
    code, out, err = run("cost")
    assert (code, out) == (2, "")
    assert sentence in err


SPEC = """
name: {name}
command: python x.py
params: {{seed: 0}}
resources: {{nodes: 2, gpus_per_node: 4, spares: 1, time: "10:00:00"}}
slurm: {{partition: "{partition}"}}
"""
GPUS = (
    "prices: {currency: EUR, partitions: {gpu: {gpu_hour: {a100: 12}}, spot: {node_hour: 8}, dear: {node_hour: 9}}}\n"
)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        # Three nodes, of which one is spare, at 8 EUR for ten hours.
        ([], "at most 240.00 EUR per attempt"),
        # Slurm may choose the dearer one of two partitions; each of two runs that share a job pays half of it.
        (["slurm.partition=dear,spot"], "at most 270.00 EUR per attempt"),
        (["resources.gpu_type=a100", "slurm.partition=gpu"], "at most 1,440 EUR per attempt"),
        (["slurm.partition=gpu"], "unknown cost: partition gpu has no price for GPUs of an unknown type"),
        (["resources.gpu_type=h100", "slurm.partition=gpu"], "unknown cost: partition gpu has no price for h100"),
        (["slurm.partition=null"], "unknown cost: set 'slurm.partition', since the price depends on it"),
        (["resources.time=null"], "unknown cost: there is no limit without 'resources.time'"),
        (["--sweep", "params.seed=1,2,3"], "at most 720.00 EUR per attempt"),
        (["--sweep", "params.seed=1,2,3,4", "--sweep", "pack=2", "resources.nodes=1", "resources.spares=0",
          "resources.cpus_per_proc=1"], "at most 160.00 EUR per attempt"),
        (["name=gpt"], "at most 240.00 EUR per attempt, 50.58 EUR at the mean cost of 2 completed runs of that name"),
        (["name=gpt", "--sweep", "params.seed=1,2"], "at most 480.00 EUR per attempt, 101.16 EUR at the mean cost"),
        (["resources.components=[{nodes: 1, slurm: {partition: spot}}, {nodes: 2, slurm: {partition: dear}}]",
          "resources.nodes=3", "resources.spares=0"], "at most 260.00 EUR per attempt"),
    ],
)  # fmt: skip
def test_before_submission_it_says_what_runs_may_cost(run: Run, root: Path, overrides: list[str], line: str) -> None:
    (root / "slurmtrain.yaml").write_text(GPUS)
    (root / "x.py").touch()
    (root / "exp.yaml").write_text(SPEC.format(name="new", partition="spot"))
    # The registry learns of the runs that are there.
    run("status")
    code, out, _ = run("submit", "exp.yaml", "--dry-run", "--executor", "slurm", *overrides)
    assert code == 0
    assert out.splitlines()[-1].startswith(line)
    price = json.loads(run("submit", "exp.yaml", "--dry-run", "--executor", "slurm", "--json", *overrides)[1])["price"]
    assert (price["problem"] is None) == (not line.startswith("unknown"))
    assert price["earlier_runs"] == (2 if "name=gpt" in overrides else 0)
    _, rendered, _ = run("render", "exp.yaml", *overrides)
    assert any(each.removeprefix("# ").startswith(line) for each in rendered.splitlines())


def test_a_preview_creates_nothing_and_needs_no_prices(run: Run, root: Path, tmp_path: Path) -> None:
    (root / "slurmtrain.yaml").write_text("")
    (root / "x.py").touch()
    (root / "exp.yaml").write_text(SPEC.format(name="gpt", partition="spot"))
    empty = tmp_path / "none"
    code, out, _ = run("--runs", str(empty), "submit", "exp.yaml", "--dry-run", "--executor", "slurm")
    assert (code, out) == (0, "1 run, at most 120.0 GPU-hours and 30.0 node-hours per attempt\n")
    assert not empty.exists()
    run("status")
    (root / "slurmtrain.yaml").write_text(PRICES)
    (root / "exp.yaml").write_text(SPEC.format(name="gpt", partition="spot").replace("spares: 1", "spares: 0"))
    _, out, _ = run("submit", "exp.yaml", "--dry-run", "--executor", "slurm")
    assert out.splitlines() == shown_in_docs("$ slurmtrain submit --dry-run exp.yaml")
    (root / "slurmtrain.yaml").write_text("")
    _, out, _ = run("submit", "exp.yaml", "--dry-run", "--executor", "slurm")
    assert out.splitlines()[-1] == "25.3 GPU-hours at the mean cost of 2 completed runs of that name"


def test_what_others_have_named_is_printed_without_its_control_characters(run: Run, root: Path) -> None:
    workspace = make_workspace(root / "runs")
    sim: Any = preempted_run(workspace.root.run("0000000004"), name="\x1b[31mred\x1b]0;title\x07")
    sim.job = "8"
    sim.submitted(2, by="resume", partition="\x1b[2Jgone").started(submission=2, partition="\x1b[2Jgone")
    sim.later(50).ended("completed")
    _, out, err = run("cost", "0000000004")
    assert "\x1b" not in out + err
    assert "partition \\x1b[2Jgone has no price" in err
