"""What is exported to Prometheus, and that its counters never fall."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmtrain.model.run.accounting import INTERRUPTED, Placement, merged
from slurmtrain.model.run.run import CAUSES
from slurmtrain.ops.shared.observe import rebuild
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.plugins.prometheus.counters import Counters
from slurmtrain.plugins.prometheus.families import COUNTER, SUMMARY, Families
from slurmtrain.registry.cells import Sent
from slurmtrain.registry.transaction import Transaction

pytest.importorskip("prometheus_client", reason="the extra prometheus is not installed")

from helpers.checkpoints import gone
from helpers.metered_runs import Samples, export, parse, value, write_metered_run
from helpers.simulated_run import RUN_ID, SimulatedRun

_COUNTED = {name for family in Families() if family.kind in (COUNTER, SUMMARY) for name in family.exported}


def counters_of(samples: Samples) -> Samples:
    return {key: number for key, number in samples.items() if key[0] in _COUNTED}


def test_attempts_interruptions_and_seconds_are_counted_by_partition(workspace: Workspace) -> None:
    write_metered_run(workspace)
    samples = parse(export(workspace))
    spot = {"executor": "local", "partition": "spot"}
    assert value(samples, "slurmtrain_attempts_total", **spot) == 2
    assert value(samples, "slurmtrain_interruptions_total", cause="preempted", **spot) == 1
    assert value(samples, "slurmtrain_interruptions_total") == 1
    assert value(samples, "slurmtrain_lost_steps_total", **spot) == 5
    assert value(samples, "slurmtrain_queue_seconds_count", **spot) == 2
    assert value(samples, "slurmtrain_queue_seconds_sum", **spot) > 9
    nodes, gpus = (value(samples, f"slurmtrain_{each}_seconds_total") for each in ("node", "gpu"))
    assert gpus == 4 * nodes
    lost = value(samples, "slurmtrain_node_unproductive_seconds_total", kind="lost")
    assert 0 < lost < value(samples, "slurmtrain_node_unproductive_seconds_total") < nodes
    assert value(samples, "slurmtrain_gpu_unproductive_seconds_total", kind="lost") == 4 * lost


def test_seconds_of_gpus_are_those_that_each_attempt_was_given(workspace: Workspace) -> None:
    sim = SimulatedRun(workspace.root.run(RUN_ID), executor="local")
    sim.created(resources={"nodes": 1, "gpus_per_node": 8}).submitted(process=gone()).started().reached(1)
    sim.later(100).ended("failed")
    before = parse(export(workspace))
    of_nodes, of_gpus = (value(before, f"slurmtrain_{each}_seconds_total") for each in ("node", "gpu"))
    assert of_gpus == 8 * of_nodes > 0
    sim.job = "job-2"
    fewer = {"nodes": 2, "gpus_per_node": 2}
    sim.submitted(2, process=gone(), command="x", resources=fewer).started(submission=2, nodes=2).later(50)
    sim.ended("failed").ended("failed", 1)
    # This one repeats what the one before has stated.
    sim.job = "job-3"
    sim.submitted(3, process=gone()).started(submission=3).later(25).ended("failed")
    after = parse(export(workspace))
    assert value(after, "slurmtrain_gpu_seconds_total") - of_gpus == pytest.approx(
        2 * (value(after, "slurmtrain_node_seconds_total") - of_nodes)
    )
    assert value(after, "slurmtrain_node_seconds_total") > of_nodes


@pytest.mark.parametrize(("share_gpu", "gpus"), [(False, 2.0), (True, 0.5)])
def test_a_run_of_a_pack_counts_for_its_share_of_the_node(workspace: Workspace, share_gpu: bool, gpus: float) -> None:
    sim = SimulatedRun(workspace.root.run(RUN_ID), executor="local")
    sim.created(resources={"nodes": 1, "gpus_per_node": 2})
    sim.submitted(process=gone(), pack={"runs": 4, "share_gpu": share_gpu}).started().reached(1)
    sim.later(100).ended("failed")
    samples = parse(export(workspace))
    [attempt] = workspace.store.load(RUN_ID).attempts
    seconds = sum(spent for kind, spent in attempt.spent.items() if kind != "queue")
    assert value(samples, "slurmtrain_node_seconds_total") == pytest.approx(seconds / 4)
    assert value(samples, "slurmtrain_gpu_seconds_total") == pytest.approx(seconds * gpus)


@pytest.mark.parametrize("amount", ["NaN", "Infinity", "-5", "1e999"])
def test_amounts_that_cannot_be_are_not_counted(workspace: Workspace, amount: str) -> None:
    write_metered_run(workspace)
    expected = counters_of(parse(export(workspace)))
    with workspace.root.counters.open("a") as file:
        file.write(
            f'{{"run": "9", "place": ["local", "spot"], "sums": [["local", "spot", {{"attempts": {amount}}}]]}}\n'
        )
    assert counters_of(parse(export(workspace))) == expected


def test_every_state_and_cause_is_there_before_it_first_occurs(workspace: Workspace) -> None:
    write_metered_run(workspace)
    samples = parse(export(workspace))
    assert value(samples, "slurmtrain_runs", state="completed") == 1
    assert value(samples, "slurmtrain_runs", state="lost") == 0
    for cause in set(CAUSES) - {"completed", "cancelled"}:
        assert value(samples, "slurmtrain_interruptions_total", cause=cause) in (0, 1)


def test_only_runs_that_have_not_ended_have_series_of_their_own(workspace: Workspace) -> None:
    write_metered_run(workspace, 1)
    write_metered_run(workspace, 2, ends=False)
    samples = parse(export(workspace))
    assert {dict(labels)["run"] for name, labels in samples if name.startswith("slurmtrain_run_")} == {"0000000002"}
    run = {"run": "0000000002", "name": "cnn"}
    assert value(samples, "slurmtrain_run_info", state="running", partition="spot", **run) == 1
    assert value(samples, "slurmtrain_run_steps", **run) == 7
    assert value(samples, "slurmtrain_run_target_steps", **run) == 20
    assert value(samples, "slurmtrain_run_attempts", **run) == 2
    assert value(samples, "slurmtrain_run_checkpoint_steps", **run) == 5
    saved, begun = (
        value(samples, f"slurmtrain_run_{each}_timestamp_seconds", **run) for each in ("checkpoint", "started")
    )
    assert saved > begun > 1000
    assert "slurmtrain_run_" not in export(workspace, per_run=False)


def note_gpus(workspace: Workspace, run_id: str, restart: int, joules: float, used: float = 90.0) -> None:
    """What the two nodes of an attempt have noted, each with one GPU."""
    for node in range(2):
        path = workspace.root.run(run_id).attempt("7", restart).system_metrics(node)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        for number in range(6):
            share = (number + 1) / 6
            figures = {"gpu_0_energy_joules": joules * share, "gpu_0_utilization_percentage": used}
            figures |= {"gpu_0_power_usage_watts": 300.0, "gpu_0_memory_usage_megabytes": 1000.0}
            lines.append(json.dumps({"t": time.time() - 3600 + 600 * (number + 1), "metrics": figures}) + "\n")
        path.write_text("".join(lines))


def test_gpus_have_energy_that_never_falls_and_running_ones_their_use(workspace: Workspace) -> None:
    resources = {"nodes": 2, "gpus_per_node": 1}
    sim = SimulatedRun(workspace.root.run(RUN_ID), spec={"name": "cnn", "resources": resources})
    sim.created(resources=resources).submitted().started(nodes=2).stopped().later(60).started(1, nodes=2)
    note_gpus(workspace, RUN_ID, 0, 5000.0)
    note_gpus(workspace, RUN_ID, 1, 2000.0)
    samples = parse(export(workspace))
    run = {"run": RUN_ID, "name": "cnn"}
    assert value(samples, "slurmtrain_gpu_energy_joules_total") == 14_000
    assert value(samples, "slurmtrain_run_gpu_utilization_ratio", **run) == 0.9
    assert value(samples, "slurmtrain_run_gpu_memory_bytes", **run) == 2e9
    assert value(samples, "slurmtrain_run_gpu_power_watts", **run) == 600
    assert not [name for name, _ in samples if "idle" in name]
    note_gpus(workspace, RUN_ID, 1, 3000.0, used=0.0)
    samples = parse(export(workspace))
    assert value(samples, "slurmtrain_gpu_energy_joules_total") == 16_000
    assert value(samples, "slurmtrain_run_gpu_utilization_ratio", **run) == 0
    assert abs(value(samples, "slurmtrain_run_idle_timestamp_seconds", **run) - (time.time() - 3000)) < 60
    sim.ended("completed", restart=1).ended("completed", node=1, restart=1)
    shutil.rmtree(workspace.root.run(RUN_ID).attempt("7", 0).logs)
    samples = parse(export(workspace))
    assert value(samples, "slurmtrain_gpu_energy_joules_total") == 16_000
    assert not [name for name, _ in samples if name.startswith("slurmtrain_run_")]


def test_trackers_that_lag_or_fail_are_counted(workspace: Workspace) -> None:
    for number in (1, 2, 3):
        write_metered_run(workspace, number, ends=number > 1)
    export(workspace)
    revisions = {run_id: listed.revision for run_id, listed in workspace.store.listed().items()}

    def send(transaction: Transaction) -> None:
        for tracker, problem in (("mlflow", ""), ("wandb", "the server is down")):
            for number, behind in (("0000000001", 1), ("0000000002", 0)):
                revision = revisions[number] - (behind if problem else 0)
                sent = Sent(tracker, "uri", revision=revision, problem=problem if behind else "")
                transaction.set_sent(number, sent)

    workspace.store.write(send)
    samples = parse(export(workspace))
    assert value(samples, "slurmtrain_tracker_unsent_runs") == 1
    assert value(samples, "slurmtrain_tracker_failing_runs", tracker="wandb") == 1
    assert value(samples, "slurmtrain_tracker_failing_runs", tracker="mlflow") == 0


def test_an_empty_root_is_exported_and_left_empty(workspace: Workspace) -> None:
    assert value(parse(export(workspace)), "slurmtrain_build_info") == 1
    assert not workspace.root.path.exists()
    workspace.root.path.mkdir(exist_ok=True)
    export(workspace)
    assert list(workspace.root.path.iterdir()) == []


def test_counters_stay_when_runs_are_deleted_and_the_registry_is_rebuilt(workspace: Workspace) -> None:
    write_metered_run(workspace, 1)
    write_metered_run(workspace, 2)
    before = parse(export(workspace))
    aside = workspace.root.path.parent / "aside"
    workspace.root.run("0000000001").path.rename(aside)
    gone = parse(export(workspace))
    assert value(gone, "slurmtrain_runs", state="completed") == 1
    assert counters_of(gone) == counters_of(before)
    rebuild(Workspace(workspace.config))
    assert counters_of(parse(export(workspace))) == counters_of(before)
    aside.rename(workspace.root.run("0000000001").path)
    assert counters_of(parse(export(workspace))) == counters_of(before), "a run that returns is not counted twice"


def test_a_process_that_goes_on_counts_as_a_new_one_does(workspace: Workspace) -> None:
    counters = Counters()
    sim = write_metered_run(workspace, ends=False)
    early = counters_of(parse(export(workspace, counters)))
    sim.reached(12, 1, loss=0.3).crashed(restart=1).ended("crash", 1, 1)
    late = counters_of(parse(export(workspace, counters)))
    assert late == counters_of(parse(export(workspace)))
    assert all(late[key] >= number for key, number in early.items())
    assert value(late, "slurmtrain_interruptions_total") == 2


@pytest.mark.parametrize("cut", [1, 40])
def test_a_killed_writer_and_lines_that_mean_nothing_are_passed_over(workspace: Workspace, cut: int) -> None:
    write_metered_run(workspace, 1)
    expected = counters_of(parse(export(workspace)))
    content = workspace.root.counters.read_bytes()
    odd = b'{"run": 1}\n[]\n{"run": "x", "place": ["a"], "sums": 1}\n{"run": "y", "place": ["a", "b"], "sums": [[1]]}\n'
    workspace.root.counters.write_bytes(odd + content + content[:-cut])
    assert counters_of(parse(export(workspace))) == expected
    assert counters_of(parse(export(workspace))) == expected


def test_the_file_does_not_grow_for_ever(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurmtrain.plugins.prometheus.counters._SPARE_LINES", 0)
    sim = write_metered_run(workspace, ends=False)
    counters = Counters()
    for step in range(8, 20):
        sim.later(1).reached(step, 1, loss=0.1)
        before = export(workspace, counters)
    assert len(workspace.root.counters.read_bytes().split()) < 200
    assert workspace.root.counters.read_bytes().count(b"\n") <= 8
    assert counters_of(parse(export(workspace))) == counters_of(parse(before))


def test_where_nothing_can_be_written_metrics_are_exported_with_a_warning(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slurmtrain.plugins.prometheus.families import collect

    write_metered_run(workspace)
    workspace.root.counters.mkdir(parents=True)
    collection = collect(Workspace(workspace.config), Counters(), per_run=False)
    assert [note for note in collection.notes if "counters cannot be kept" in note]
    attempts = next(family for family in collection.families if family.name == "slurmtrain_attempts_total")
    assert attempts.samples == {("local", "spot"): (2.0,)}
    shutil.rmtree(workspace.root.counters)


_TALLIES = st.dictionaries(
    st.sampled_from([Placement("local", ""), Placement("slurm", "spot")]),
    st.dictionaries(st.sampled_from(["attempts", INTERRUPTED + "oom"]), st.floats(0, 9)),
)


@settings(max_examples=50)
@given(_TALLIES, _TALLIES)
def test_of_two_tallies_the_larger_sums_count_in_whatever_order(
    first: dict[Placement, dict[str, float]], second: dict[Placement, dict[str, float]]
) -> None:
    both = merged(first, second)
    assert both == merged(second, first) == merged(both, first)
    assert all(both[place][name] >= number for place, sums in first.items() for name, number in sums.items())


def test_exported_names_follow_prometheus_conventions(tmp_path: Path) -> None:
    for family in Families():
        assert family.name.startswith("slurmtrain_")
        assert family.name.endswith("_total") == (family.kind == COUNTER), family.name
        if any(word in family.name for word in ("timestamp", "duration", "queue")):
            assert family.name.removesuffix("_total").endswith("_seconds"), family.name
        assert not family.help.endswith(".")
