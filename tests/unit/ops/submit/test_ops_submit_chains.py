"""Several specs in one submission, and runs that start after others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.fakeslurm import SlurmCommands, squeue_line
from helpers.simulated_run import SimulatedRun
from helpers.workspaces import sync_again

from slurmtrain.errors import RunBusy, SlurmtrainError, SpecError, SubmitFailed, UserError
from slurmtrain.model.run.lineage import Upstream
from slurmtrain.ops.cancel import cancel
from slurmtrain.ops.delete import find_deletable
from slurmtrain.ops.query.select import Question, select_runs
from slurmtrain.ops.resume import resume, resume_failed
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.views import run_json
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit import load_all, split_sources, submit_specs
from slurmtrain.ops.watch import wait
from slurmtrain.runtime.upstreams import dependents_of, read_upstreams

pytestmark = pytest.mark.usefixtures("slurm")

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a spec of this name."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, *lines: str) -> Path:
        path = tmp_path / f"{name}.yaml"
        path.write_text("\n".join(["command: python -c pass", "tracking: {mlflow: {enabled: false}}", *lines]) + "\n")
        return path

    return write


def submit_all(
    workspace: Workspace, *paths: Path, after: tuple[str, ...] = (), overrides: tuple[str, ...] = (), **more: Any
) -> list[str]:
    specs = load_all(paths, overrides, (), after, max_runs=100)
    return submit_specs(workspace, specs, **{"executor": "slurm", **more}).run_ids


def dependency(workspace: Workspace, run_id: str) -> str:
    """What the newest job of a run waits for, as its batch script has it."""
    [path] = workspace.root.run(run_id).submissions.glob("*/submitit/8_submission.sh")
    lines = [line for line in path.read_text().splitlines() if "--dependency=" in line]
    return lines[0].partition("--dependency=")[2] if lines else ""


def names(upstreams: list[Upstream]) -> list[str]:
    return [upstream.run for upstream in upstreams]


def simulate(workspace: Workspace, run_id: str, **fields: Any) -> SimulatedRun:
    """What the job of a submitted run goes on to write."""
    sim = SimulatedRun(workspace.root.run(run_id), job="8", now=2_000_000_000.0)
    return sim.started(host="n0", **fields)


def test_specs_are_submitted_behind_those_that_they_start_after(workspace: Workspace, write: Write) -> None:
    evaluate = write("evaluate", "after: [finetune, 'afterany:pretrain']")
    finetune = write("finetune", "params: {init: '${run.pretrain.checkpoint}'}")
    pretrain = write("pretrain")
    last, middle, first = submit_all(workspace, evaluate, finetune, pretrain)
    assert workspace.run_ids() == [first, middle, last]
    assert [dependency(workspace, each) for each in (first, middle, last)] == ["", "afterany:8", "afterany:8"]
    root = workspace.root
    assert read_upstreams(root.run(first)) == []
    assert read_upstreams(root.run(middle)) == [Upstream(first, "pretrain")]
    assert read_upstreams(root.run(last)) == [Upstream(middle, "finetune"), Upstream(first, "pretrain", any=True)]
    assert dependents_of(root.run(first)) == [middle, last]
    observed = observe(workspace)
    assert run_json(workspace, observed.runs[middle])["reason"] == "after pretrain (pending)"
    assert run_json(workspace, observed.runs[last])["reason"] == "after finetune (pending), after pretrain (pending)"


def test_a_name_means_the_newest_run_of_that_name_and_the_name_of_a_sweep_all_of_its_runs(
    workspace: Workspace, write: Write
) -> None:
    sweep = write("prep", "params: {a: 1}", "sweep: {params.a: [1, 2, 3]}")
    submit_all(workspace, sweep)
    elements = submit_all(workspace, sweep)
    [report] = submit_all(workspace, write("report", "after: prep"))
    assert names(read_upstreams(workspace.root.run(report))) == elements
    assert dependency(workspace, report) == "afterany:8_0:8_1:8_2"
    swept = submit_all(workspace, write("many", "params: {a: 1}", "sweep: {params.a: [1, 2]}"), after=(elements[0],))
    assert [names(read_upstreams(workspace.root.run(each))) for each in swept] == [[elements[0]]] * 2
    [array] = {
        path for path in workspace.root.arrays.glob("*/submitit/8_submission.sh") if "afterany" in path.read_text()
    }
    assert "--dependency=afterany:8_0\n" in array.read_text()
    assert submit_all(workspace, write("byid", f"after: {elements[0]}"))
    lines = select_runs(workspace, observe(workspace).runs, Question(names=[report], tree=True, folds=True)).lines
    assert [(line["name"], line["depth"], line["state"], line["reason"].partition("; ")[0]) for line in lines] == [
        ("prep", 0, "3 pending", ""),
        ("report", 1, "pending", "after prep (3 pending)"),
        ("many", 1, "2 pending", f"after {elements[0]} (pending)"),
        ("byid", 1, "pending", f"after {elements[0]} (pending)"),
    ]


def test_a_search_is_nothing_to_start_after_until_it_is_over(workspace: Workspace, write: Write) -> None:
    first, _ = submit_all(workspace, write("tune", "params: {a: 1}", "sweep: {params.a: [1, 2]}"))
    sweep = observe(workspace).runs[first].sweep
    record = workspace.root.searches / f"{sweep}.json"
    record.parent.mkdir()
    record.write_text("{}")
    report = write("report", "after: tune")
    with pytest.raises(UserError, match=f"after: search 'tune' has not .*'slurmtrain wait {sweep}'"):
        submit_all(workspace, report)
    assert submit_all(workspace, write("of_one", f"after: {first}"))
    record.unlink()
    assert submit_all(workspace, report)


def test_after_on_the_command_line_adds_to_that_of_the_spec(workspace: Workspace, write: Write) -> None:
    ids = submit_all(workspace, write("a"), write("b"))
    [run_id] = submit_all(workspace, write("c", "after: a"), after=("afterany:b", "a"))
    assert read_upstreams(workspace.root.run(run_id)) == [Upstream(ids[0], "a"), Upstream(ids[1], "b", any=True)]
    assert '# override: after=["a", "afterany:b"]' in workspace.root.run(run_id).spec.read_text()


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({"a": ["after: a"]}, "a.yaml: after: the run would wait for itself"),
        ({"a": ["after: b"], "b": ["after: c"], "c": ["after: a"]}, "would wait for each other: a.yaml -> b.yaml"),
        ({"a": ["after: nope"]}, "a.yaml: after: there is no run 'nope'"),
        ({"a": ["env: {A: '${run.nope.dir}'}"]}, "a.yaml: after: there is no run 'nope'"),
        ({"a": ["name: x"], "b": ["name: x"], "c": ["after: x"]}, "'x' is the name of several specs: a.yaml, b.yaml"),
        (
            {"a": ["params: {x: 1}", "sweep: {params.x: [1, 2]}"], "b": ["env: {A: '${run.a.dir}'}"]},
            "b.yaml: ${run.a.dir}: 'a' stands for 2 runs",
        ),
    ],
)
def test_a_chain_that_cannot_be_is_refused_whole(
    workspace: Workspace, slurm: SlurmCommands, write: Write, specs: dict[str, list[str]], message: str
) -> None:
    with pytest.raises(UserError) as raised:
        submit_all(workspace, *(write(name, *lines) for name, lines in specs.items()))
    assert message in str(raised.value)
    assert workspace.run_ids() == []
    assert slurm.calls("sbatch") == []


def test_one_failing_spec_submits_none_and_mistakes_of_all_are_listed(workspace: Workspace, write: Write) -> None:
    with pytest.raises(SpecError) as raised:
        submit_all(workspace, write("a"), write("b", "nodes: 2"), write("c", "after: 'x y'"))
    assert [mistake.key for mistake in raised.value.mistakes] == ["nodes", "after.0"]
    with pytest.raises(SlurmtrainError):
        submit_all(workspace, write("a"), write("d", "workdir: /no/such/place"))
    with pytest.raises(UserError, match="is given twice"):
        submit_all(workspace, write("a"), write("a"))
    with pytest.raises(UserError, match="write a section 'sweep' into the spec"):
        load_all([write("a"), write("b")], (), ("params.x=1,2",), (), max_runs=9)
    assert workspace.run_ids() == []


def test_a_job_that_slurm_refuses_leaves_those_before_it_and_removes_those_behind_it(
    workspace: Workspace, slurm: SlurmCommands, write: Write
) -> None:
    [pretrain] = submit_all(workspace, write("pretrain"))
    slurm.fails("sbatch", "sbatch: error: Batch job submission failed: Job dependency problem")
    with pytest.raises(SlurmtrainError, match="Job dependency problem"):
        submit_all(workspace, write("b", "after: pretrain"), write("c", "after: b"))
    assert workspace.run_ids() == [pretrain]
    # What is left of them in the directory of the first concerns nobody.
    assert sync_again(workspace).problems == []


@pytest.mark.parametrize(("end", "words"), [("crashed", "failed: rank 0"), ("cancelled", "was cancelled")])
def test_a_run_that_has_failed_already_is_refused_unless_any_end_will_do(
    workspace: Workspace, write: Write, end: str, words: str
) -> None:
    [pretrain] = submit_all(workspace, write("pretrain", "requeue: {max_failures: 0}"))
    sim = simulate(workspace, pretrain)
    sim.crashed() if end == "crashed" else sim.cancel().ended("cancelled")
    with pytest.raises(UserError) as raised:
        submit_all(workspace, write("finetune", "after: pretrain"))
    assert f"run {pretrain} (pretrain) {words}" in str(raised.value)
    assert f"'slurmtrain resume {pretrain}' starts it again" in str(raised.value)
    [run_id] = submit_all(workspace, write("finetune", "after: 'afterany:pretrain'"))
    assert dependency(workspace, run_id) == ""


def test_a_completed_run_is_no_dependency_of_the_job_but_must_have_what_is_referred_to(
    workspace: Workspace, write: Write
) -> None:
    [pretrain] = submit_all(workspace, write("pretrain"))
    simulate(workspace, pretrain).ended("completed")
    [run_id] = submit_all(workspace, write("finetune", "after: pretrain"))
    assert dependency(workspace, run_id) == ""
    with pytest.raises(UserError, match=rf"\$\{{run.pretrain.checkpoint\}}: run {pretrain} has no checkpoint"):
        submit_all(workspace, write("finetune", "env: {A: '${run.pretrain.checkpoint}'}"))


def test_a_run_elsewhere_that_has_not_ended_cannot_be_waited_for(workspace: Workspace, write: Write) -> None:
    [pretrain] = submit_all(workspace, write("pretrain"))
    with pytest.raises(UserError, match=f"run {pretrain} .* is on slurm and this one would be on local"):
        submit_all(workspace, write("finetune", "after: pretrain"), executor="local")


def test_a_key_names_the_runs_of_all_specs(workspace: Workspace, write: Write) -> None:
    specs = [write("b", "after: a", "params: {x: 1}", "sweep: {params.x: [1, 2]}"), write("a")]
    ids = submit_all(workspace, *specs, key="k")
    assert submit_all(workspace, *specs, key="k") == ids
    assert len(workspace.run_ids()) == 3
    with pytest.raises(UserError, match="was used to submit something else"):
        submit_all(workspace, specs[1], key="k")


def test_cancelling_a_run_ends_all_that_can_never_start_without_it(
    workspace: Workspace, slurm: SlurmCommands, write: Write
) -> None:
    first, middle, last, free = submit_all(
        workspace, write("a"), write("b", "after: a"), write("c", "after: b"), write("d", "after: 'afterany:b'")
    )
    simulate(workspace, first).cancel().ended("cancelled")
    cancel(workspace, [first])
    observe(workspace, ask_slurm=False)
    runs = {run_id: workspace.store.load(run_id) for run_id in (middle, last, free)}
    assert [(run.state, run.newest.cause) for run in runs.values() if run and run.newest] == [
        ("failed", "upstream"),
        ("failed", "upstream"),
        ("pending", None),
    ]
    assert runs[middle].reason == f"run {first} (a) was cancelled"  # type: ignore[union-attr]
    assert runs[last].reason == f"run {middle} (b) failed: run {first} (a) was cancelled"  # type: ignore[union-attr]
    # Its job would be requeued for no other reason either.
    slurm.replies("squeue", squeue_line("8", run_id=free))
    assert sync_again(workspace).started == []


def test_sync_ends_what_waits_for_a_run_that_failed_and_resume_starts_both_again(
    workspace: Workspace, slurm: SlurmCommands, write: Write
) -> None:
    first, second = submit_all(workspace, write("a", "requeue: {max_failures: 0}"), write("b", "after: a"))
    simulate(workspace, first).crashed()
    synced = sync_again(workspace)
    assert synced.ended == [second]
    [note] = synced.notes
    assert note.startswith(f"run {second} was ended: run {first} (a) failed: rank 0 exited with code 1")
    assert sync_again(workspace).ended == []
    slurm.replies("sacct", f"8|FAILED|1:0|2000000000|2000000100|300|30|n0|a-{first}\n")
    with pytest.raises(UserError, match=f"run {first} .a. failed: .*'slurmtrain resume' that run first"):
        resume(workspace, second)
    slurm.replies("sbatch", "Submitted batch job 9\n")
    notes = resume_failed(workspace, [first, second]).notes
    assert [note for note in notes if f"run {second} cannot start" in note]
    assert [note for note in notes if f"run {second} (b) had ended because of it" in note]
    slurm.replies("sbatch", "Submitted batch job 10\n")
    resume(workspace, second)
    [script] = workspace.root.run(second).submission(2).submitit.glob("10_submission.sh")
    assert "--dependency=afterany:9,singleton\n" in script.read_text()


def test_a_job_that_is_submitted_for_a_run_moves_those_behind_it(
    workspace: Workspace, slurm: SlurmCommands, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    [first] = submit_all(workspace, write("a"))
    slurm.replies("sbatch", "Submitted batch job 9\n")
    [second] = submit_all(workspace, write("b", "after: a", "slurm: {dependency: 'after:3', begin: now+9hours}"))
    simulate(workspace, first).crashed()
    slurm.replies("sacct", f"8|FAILED|1:0|2000000000|2000000100|300|30|n0|a-{first}\n")
    slurm.replies("sbatch", "Submitted batch job 10\n")
    resume(workspace, first, from_start=True)
    moves = [call.args for call in slurm.calls("scontrol") if "update" in call.args]
    # The time that its spec says stays.
    assert moves == [["update", "JobId=9", "Dependency=after:3,afterany:10"]]
    # If that cannot be done, the run has its job all the same.
    simulate_again = SimulatedRun(workspace.root.run(first), job="10", now=2_000_000_200.0)
    simulate_again.started(host="n0", submission=2).crashed()
    slurm.replies("sacct", f"10|FAILED|1:0|2000000200|2000000300|300|30|n0|a-{first}\n")
    slurm.fails("scontrol", "slurm_update error: Job has already started")
    monkeypatch.setattr("slurmtrain.ops.resume.check_executor", lambda *_: None)
    _, notes = resume(workspace, first, from_start=True)
    assert [note for note in notes if f"the job of run {second} could not be made to wait" in note]


@pytest.mark.parametrize("has_job", [True, False])
def test_sync_lets_a_job_that_would_look_again_later_start_when_it_is_its_turn(
    workspace: Workspace, slurm: SlurmCommands, write: Write, has_job: bool
) -> None:
    [first] = submit_all(workspace, write("a", "requeue: {max_failures: 0}"))
    slurm.replies("sbatch", "Submitted batch job 9\n")
    [second] = submit_all(workspace, write("b", "after: 'afterany:a'"))
    upstream = simulate(workspace, first)
    waiting = SimulatedRun(workspace.root.run(second), job="9", now=2_000_000_000.0).started(host="n0")
    waiting.node("requeue", cause="early", why="after a (has not ended)", exclude=[], delay_s=0.0).ended("early")
    waits = squeue_line("9", reason="BeginTime", restart=1, run_id=second)
    running = squeue_line("8", run_id=first).replace("PENDING", "RUNNING")
    slurm.replies("squeue", waits)
    slurm.replies("sacct", "")
    assert not sync_again(workspace).problems
    # Nothing of the run before it is in the queue, but it has not ended: a command must say what becomes of it.
    assert [call for call in slurm.calls("scontrol") if "update" in call.args] == []
    if has_job:
        slurm.replies("squeue", waits + running)
    else:
        upstream.crashed()
    assert not sync_again(workspace).problems
    moves = [call.args for call in slurm.calls("scontrol") if "update" in call.args]
    assert moves == [["update", "JobId=9", f"Dependency={'afterany:8' if has_job else ''}", "StartTime=now"]]


def test_who_waits_for_a_run_sees_to_those_that_it_waits_for(
    workspace: Workspace, slurm: SlurmCommands, write: Write
) -> None:
    first, _, last = submit_all(workspace, write("a"), write("b", "after: a"), write("c", "after: b"))
    simulate(workspace, first).reached(10).stopped()
    slurm.replies("sacct", f"8|TIMEOUT|0:0|2000000000|2000000100|300|30|n0|a-{first}\n")
    slurm.replies("sbatch", "Submitted batch job 10\n")
    looks = iter(range(3))

    class Twice:
        def wait(self, _seconds: float) -> bool:
            return next(looks) > 1

    wait(Workspace(workspace.config, warn=pytest.fail), [last], lambda _: None, Twice())
    run = workspace.store.load(first)
    assert [attempt.job_id for attempt in run.attempts] == ["8", "10"]


def test_a_run_that_another_waits_for_is_not_deleted(workspace: Workspace, slurm: SlurmCommands, write: Write) -> None:
    first, second = submit_all(workspace, write("a"), write("b", "after: a"))
    simulate(workspace, first).ended("completed")
    slurm.replies("sacct", f"8|COMPLETED|0:0|2000000000|2000000100|300|30|n0|a-{first}\n")
    slurm.replies("squeue", squeue_line("8", run_id=second))
    with pytest.raises(
        RunBusy,
        match=rf"run {second} \(b\) has not ended and may need the files of run {first}.* "
        "starts after it",
    ):
        find_deletable(workspace, [first], forget=False)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("after=[c]", "after: the runs that a run starts after cannot be changed"),
        ("params.x=${run.c.step}", "${run.c.step}: a run can only refer to runs that it was submitted to start after"),
    ],
)
def test_a_run_does_not_get_other_runs_to_start_after_later(
    workspace: Workspace, slurm: SlurmCommands, write: Write, override: str, message: str
) -> None:
    submit_all(workspace, write("a"), write("c"))
    slurm.replies("sbatch", "Submitted batch job 9\n")
    [second] = submit_all(workspace, write("b", "after: a", "params: {x: 1}"))
    SimulatedRun(workspace.root.run(second), job="9", now=2_000_000_000.0).cancel().ended("cancelled")
    slurm.replies("sacct", f"9|CANCELLED|0:0|2000000000|2000000100|300|30|n0|b-{second}\n")
    with pytest.raises(SpecError) as raised:
        resume(workspace, second, [override], from_start=True)
    assert message in str(raised.value)
    assert len(slurm.calls("sbatch")) == 3
    # It was cancelled while it waited: it has no checkpoint, and needs none.
    resume(workspace, second, ["params.x=2"])
    assert len(slurm.calls("sbatch")) == 4


def test_the_elements_of_an_array_are_moved_and_cancelled_with_one_command_and_none_of_them_twice(
    workspace: Workspace, slurm: SlurmCommands, write: Write
) -> None:
    sweep = ("params: {x: 1}", "sweep: {params.x: [1, 2, 3]}")
    firsts = submit_all(workspace, write("a", *sweep))
    slurm.replies("sbatch", "Submitted batch job 9\n")
    submit_all(workspace, write("b", "after: a", *sweep))
    assert [call for call in slurm.calls("scontrol") if "update" in call.args] == []
    for index, run_id in enumerate(firsts):
        SimulatedRun(workspace.root.run(run_id), job=f"8_{index}", now=2_000_000_000.0).started(host="n0").crashed()
    ended = "".join(f"8_{i}|FAILED|1:0|2000000000|2000000100|300|30|n0|a-{run}\n" for i, run in enumerate(firsts))
    slurm.replies("sacct", ended)
    slurm.replies("sbatch", "Submitted batch job 10\n")
    resume_failed(workspace, firsts)
    moves = [call.args for call in slurm.calls("scontrol") if "update" in call.args]
    assert moves == [["update", "JobId=9_[0-2]", "Dependency=afterany:10_0:10_1:10_2"]]
    for index, run_id in enumerate(firsts):
        sim = SimulatedRun(workspace.root.run(run_id), job=f"10_{index}", now=2_000_001_000.0)
        sim.started(host="n0", submission=2).cancel().ended("cancelled")
    cancel(workspace, firsts)
    assert [call.args for call in slurm.calls("scancel")] == [["9_[0-2]"]]


def test_a_submission_that_may_have_succeeded_keeps_its_run_and_those_before_it(
    workspace: Workspace, slurm: SlurmCommands, write: Write
) -> None:
    slurm.replies("sbatch", code=-9)
    with pytest.raises(SubmitFailed) as raised:
        submit_all(workspace, write("b", "after: a"), write("a"))
    assert raised.value.run_ids == tuple(workspace.run_ids())
    assert len(workspace.run_ids()) == 1


def test_words_behind_a_spec_are_specs_or_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").write_text("")
    words = ["b.yaml", "params.lr=1", "plain", "params.file=x.yaml", "params.lr", "c.yml"]
    specs, overrides = split_sources(words)
    assert [str(spec) for spec in specs] == ["b.yaml", "plain", "c.yml"]
    assert overrides == ["params.lr=1", "params.file=x.yaml", "params.lr"]


# --- singletons -----------------------------------------------------------------------------------------------------


def test_a_singleton_waits_for_all_runs_of_its_name_that_have_not_ended(workspace: Workspace, write: Write) -> None:
    other = write("other")
    spec = write("one", "slurm: {dependency: singleton}", "params: {a: 1}")
    [first] = submit_all(workspace, spec)
    submit_all(workspace, other)
    [second] = submit_all(workspace, spec)
    as_text = ("slurm.sbatch=['-d singleton']", "slurm.dependency=null")
    [third] = submit_all(workspace, spec, overrides=(*as_text, f"after=['{first}']"))
    root = workspace.root
    assert read_upstreams(root.run(first)) == []
    assert read_upstreams(root.run(second)) == [Upstream(first, "one", any=True)]
    # A condition in "after" is not weakened.
    assert read_upstreams(root.run(third)) == [Upstream(first, first), Upstream(second, "one", any=True)]
    assert "afterany:8" in dependency(workspace, second)
    simulate(workspace, first).ended("crash", last_step=None)
    cancel(workspace, [first])
    with pytest.raises(RunBusy, match=f"run {second} of the same name has not ended"):
        resume(workspace, first)


def test_a_singleton_waits_for_jobs_of_its_name_in_other_runs_roots(
    workspace: Workspace, slurm: SlurmCommands, write: Write
) -> None:
    spec = write("x", "slurm: {dependency: singleton}")
    slurm.replies("squeue", squeue_line("5") + squeue_line("6_1", run_id="0123456789") + squeue_line("7", run_id="y"))
    [run_id] = submit_all(workspace, spec)
    assert dependency(workspace, run_id) == "singleton,afterany:5:6"
    [other] = submit_all(workspace, write("other"))
    assert dependency(workspace, other) == ""


def test_resume_starts_one_of_several_runs_of_a_singleton(
    workspace: Workspace, slurm: SlurmCommands, write: Write
) -> None:
    spec = write("x", "slurm: {dependency: singleton}", "requeue: {max_failures: 0}")
    runs = [submit_all(workspace, spec)[0] for _ in range(2)]
    for run_id in runs:
        simulate(workspace, run_id).crashed()
    slurm.replies("sacct", "")
    resumed = resume_failed(workspace, runs)
    assert list(resumed.run_ids) == runs[:1]
    [problem] = resumed.problems
    assert f"run {runs[0]} of the same name is started" in problem


def test_the_runs_of_a_singletons_sweep_run_one_at_a_time_and_share_no_job(workspace: Workspace, write: Write) -> None:
    sweep = "sweep: {params.a: [1, 2, 3]}"
    submit_all(workspace, write("one", "slurm: {dependency: singleton}", "params: {a: 1}", sweep))
    [script] = workspace.root.arrays.glob("*/submitit/8_submission.sh")
    assert "#SBATCH --array=0-2%1\n" in script.read_text()
    packed = write("two", "slurm: {dependency: singleton}", "params: {a: 1}", "sweep: {params.a: [1, 2], pack: 2}")
    with pytest.raises(SpecError, match="runs that share a job run at the same time"):
        submit_all(workspace, packed)
