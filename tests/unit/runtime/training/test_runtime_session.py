"""The library inside a script, in one process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import slurmtrain
from slurmtrain.errors import CheckpointError, DataError
from slurmtrain.model.diagnosis.hang import Phase
from slurmtrain.model.environment import RankHardware
from slurmtrain.model.experiment.plan import make_plan
from slurmtrain.model.experiment.spec import read_spec
from slurmtrain.model.interruption import interval
from slurmtrain.model.interruption.exit_report import STOPPED
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.runtime.checkpoint import checkpoint_files
from slurmtrain.runtime.job import lease
from slurmtrain.runtime.job.heartbeat import Board
from slurmtrain.runtime.training import loop, steps
from slurmtrain.runtime.training.session import describe_rank, exchange
from slurmtrain.system.files import write_json

Start = Callable[..., AttemptDir]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    directory = RunDir(tmp_path / "0123456789")
    directory.attempts.mkdir(parents=True)
    return directory


@pytest.fixture
def start(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Make this process a worker of the next attempt of the run."""
    numbers = iter(range(1, 100))
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR2, signal.SIGCONT)}

    def start_attempt(
        *, params: dict[str, Any] | None = None, from_start: bool = False, **checkpoint: Any
    ) -> AttemptDir:
        number = next(numbers)
        attempt = run.attempt(f"job{number}", 0)
        attempt.path.mkdir()
        data = {"name": "n", "command": "python x.py", "checkpoint": checkpoint, "params": params or {}}
        problems: list[str] = []
        spec = read_spec(data, lambda at, message: problems.append(f"{at}: {message}"))
        assert problems == []
        plan, _ = make_plan(spec, workdir=str(run.path), python="python", template=data)
        submission = run.submission(number)
        submission.path.mkdir(parents=True)
        write_json(submission.plan, plan.to_json())
        lease.grant(submission)
        assert lease.acquire(attempt, number)
        monkeypatch.setenv("SLURMTRAIN_SUBMISSION", str(number))
        monkeypatch.setenv("SLURMTRAIN_ATTEMPT_DIR", str(attempt.path))
        monkeypatch.setenv("SLURMTRAIN_ATTEMPT", str(number))
        monkeypatch.setenv("SLURMTRAIN_PARAMS", json.dumps(params or {}))
        if from_start:
            monkeypatch.setenv("SLURMTRAIN_FROM_START", "1")
        return attempt

    yield start_attempt
    if dist.is_initialized():
        dist.destroy_process_group()
    for each, handler in handlers.items():
        signal.signal(each, handler)


def events(attempt: AttemptDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in attempt.rank_journal(0).read_text().splitlines()]


def kinds(attempt: AttemptDir) -> list[str]:
    return [event["kind"] for event in events(attempt)]


def lines(attempt: AttemptDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in attempt.metrics.read_text().splitlines()]


def steps_on_disk(run: RunDir) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in checkpoint_files.published(run.checkpoints))


class Counter:
    """Something of a script's own with a state."""

    def __init__(self, state: Any = 0) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


def test_steps_are_counted_logged_and_saved(run: RunDir, start: Start) -> None:
    attempt = start(params={"lr": 0.5}, every={"steps": 2}, keep=2)
    with slurmtrain.session(params={"lr": 0.1, "wd": 3}) as session:
        assert session.params == {"lr": 0.5, "wd": 3}
        assert (session.rank, session.world_size, session.attempt, session.dir) == (0, 1, 1, run.path)
        session.checkpoint(model=nn.Linear(2, 2), counter=Counter())
        steps = []
        for step in session.steps(5):
            steps.append(step)
            session.log(loss=torch.tensor(float(step)), skipped=np.float32(2))
            session.log({"val/acc": 1})
        session.log(final=9)
    assert steps == [0, 1, 2, 3, 4]
    assert [line["step"] for line in lines(attempt)] == [1, 2, 3, 4, 5, 5]
    assert lines(attempt)[0]["metrics"] == {"loss": 0.0, "skipped": 2.0, "val/acc": 1}
    assert lines(attempt)[-1]["metrics"] == {"final": 9}
    assert steps_on_disk(run) == [4, 5]
    began, saves, ended = ["session", "registered", "total"], 3 * ["saved"], ["measured", "finished", "pruned"]
    assert kinds(attempt) == [*began, *saves, *ended]
    saved = [event for event in events(attempt) if event["kind"] == "saved"]
    assert [(event["step"], event["why"]) for event in saved] == [(2, "steps"), (4, "steps"), (5, "end")]
    assert saved[0]["metrics"] == {"loss": 1.0, "skipped": 2.0, "val/acc": 1.0}
    assert all(0 < event["stall_s"] <= event["seconds"] for event in saved)


def test_a_pause_is_no_part_of_a_step_and_ends_with_its_block(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start()
    board = Board(1)
    monkeypatch.setenv("SLURMTRAIN_HEARTBEAT", board.path)
    ahead = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0])
    monkeypatch.setattr("slurmtrain.runtime.training.loop.time", clock)
    phases: list[Any] = []
    with slurmtrain.session() as session:
        with session.pause():
            phases.append(board.read()[0].phase)
        phases.append(board.read()[0].phase)
        for step in session.steps(3):
            if step == 1:
                with pytest.raises(KeyError), session.pause("evaluation", limit=timedelta(minutes=5)):
                    paused = board.read()[0]
                    with session.pause("nothing of its own"):
                        assert board.read()[0] == paused
                    assert board.read()[0] == paused
                    ahead[0] += 1000.0
                    raise KeyError
                phases.append(board.read()[0].phase)
        with pytest.raises(ValueError, match="positive limit"), session.pause(limit=timedelta(0)):
            pass
    assert phases == [Phase.PAUSED, Phase.READY, Phase.TRAINING]
    assert (paused.step, paused.phase, paused.activity, paused.pause_s) == (1, Phase.PAUSED, "evaluation", 300.0)
    assert board.read()[0].step_s < 100
    board.close()


def test_a_finished_run_that_is_started_again_does_nothing(run: RunDir, start: Start) -> None:
    for _ in range(2):
        attempt = start()
        with slurmtrain.session() as session:
            session.checkpoint(counter=Counter())
            finished = list(session.steps(3))
    assert finished == []
    assert kinds(attempt) == ["session", "registered", "restored", "total", "interval", "measured", "finished"]
    start(from_start=True)
    with slurmtrain.session() as session:
        session.checkpoint(counter=Counter())
        assert session.step == 0


def test_what_a_rank_needed_is_noted_when_it_stops_and_when_it_ends(start: Start) -> None:
    dataset = TensorDataset(torch.arange(10.0))
    attempts = []
    for _ in range(2):
        attempts.append(start())
        with contextlib.suppress(SystemExit), slurmtrain.session() as session:
            loader = session.loader(dataset, 4, drop_last=True)
            model = session.parallelize(nn.Linear(1, 1))
            session.checkpoint(counter=Counter())
            for step, _batch in session.steps(7, loader):
                shared = (session.share(torch.ones(100, 1), torch.ones(100, 1)) for _ in range(2))
                session.evaluate(model, nn.functional.mse_loss, shared)
                if step == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
            session.share(range(100))
    stopped, ended = (next(event for event in events(attempt) if event["kind"] == "measured") for attempt in attempts)
    assert [(each["steps"], each["samples"], each["epoch_samples"]) for each in (stopped, ended)] == [
        (3, 12, 8),
        (4, 16, 8),
    ]
    assert stopped["memory"] == "process"
    assert stopped["peak_bytes"] > 2**26


def last_measured(attempt: AttemptDir) -> dict[str, Any]:
    return [event for event in events(attempt) if event["kind"] == "measured"][-1]


def test_what_the_script_states_of_its_model_is_noted(start: Start) -> None:
    attempt = start()
    with slurmtrain.session() as session:
        session.measure(tokens_per_sample=128, samples_per_step=32)
        session.measure(flops_per_sample=6e9)
        for _ in session.steps(3):
            pass
    measured = last_measured(attempt)
    assert (measured["tokens_per_sample"], measured["flops_per_sample"], measured["samples"]) == (128, 6e9, 96)
    # Nobody knows what this processor can do.
    assert "peak_flops" not in measured


def test_the_peak_of_a_gpu_depends_on_what_it_multiplies_matrices_in(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "hardware_of", lambda _: ("NVIDIA H100 80GB HBM3", True))
    start()
    with slurmtrain.session() as session:

        def peak(precision: str | None = None) -> float | None:
            session.measure(flops_per_sample=1, precision=precision)
            return session._stated.peak_flops

        assert (peak(), peak("bf16")) == pytest.approx((66.9e12, 989.4e12))
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            assert peak() == pytest.approx(494.7e12)
        finally:
            torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"flops_per_sample": 0}, "a positive number for flops_per_sample, not 0"),
        ({"tokens_per_sample": float("inf")}, "a positive number for tokens_per_sample, not inf"),
        ({"samples_per_step": "32"}, "a positive number for samples_per_step, not '32'"),
        ({"flops_per_sample": 1, "precision": "int8"}, "the precisions bf16, fp16, tf32, fp32, not 'int8'"),
    ],
)
def test_what_cannot_be_true_of_a_model_is_refused(start: Start, facts: dict[str, Any], problem: str) -> None:
    start()
    with slurmtrain.session() as session, pytest.raises(ValueError, match=re.escape(problem)):
        session.measure(**facts)


def test_the_time_in_the_loader_is_the_wait_for_data_and_without_one_until_the_forward_pass(start: Start) -> None:
    class Slow(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.01)
            return super().__getitem__(index)

    attempt = start()
    with slurmtrain.session() as session:
        model = session.parallelize(nn.Linear(1, 1))
        loader = session.loader(Slow(torch.ones(8, 1)), 2)
        session.checkpoint(model=model)
        for _, _batch in session.steps(6, loader):
            time.sleep(0.02)
    measured = last_measured(attempt)
    assert measured["data_wait_share"] == pytest.approx(0.5, abs=0.1)
    assert 0.04 <= measured["step_p50_s"] <= measured["step_p95_s"]
    attempt = start()
    with slurmtrain.session() as session:
        model = session.parallelize(nn.Linear(1, 1))
        session.checkpoint(model=model)
        # After each step of a while ranks agree, so that all of them are measured.
        for _ in session.steps(10):
            time.sleep(0.3)
            model(torch.ones(1, 1))
            time.sleep(0.1)
    measured = last_measured(attempt)
    assert measured["data_wait_share"] == pytest.approx(0.75, abs=0.1)
    assert measured["own_p50_s"] == pytest.approx(0.3, abs=0.1)


def test_a_rank_that_is_killed_has_noted_what_it_had_measured(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_RECORD_S", 0.01)
    attempt = start()
    with slurmtrain.session() as session:
        loader = session.loader(TensorDataset(torch.ones(8, 1)), 2)
        notes = []
        for _ in session.steps(12, loader):
            time.sleep(0.3)
            notes.append([event for event in events(attempt) if event["kind"] == "measured"])
    # Ever more rarely, with all that there was until then.
    assert len(notes[-1]) < 8
    first, *_, last = notes[-1]
    assert (first["steps"], first["samples"]) == (2, 4)
    assert last["samples"] == 2 * last["steps"]
    assert last["step_p50_s"] == pytest.approx(0.3, abs=0.1)


def test_a_stop_signal_saves_and_leaves_between_steps(run: RunDir, start: Start) -> None:
    attempt = start(every={"steps": 1000})
    after = []
    with pytest.raises(SystemExit) as left, slurmtrain.session() as session:
        session.checkpoint(counter=Counter())
        for step in session.steps(100_000):
            if step == 7:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)
        after.append("not reached")
    assert (left.value.code, after) == (STOPPED, [])
    assert kinds(attempt)[-3:] == ["saved", "measured", "stopped"]
    assert steps_on_disk(run) == [events(attempt)[-1]["step"]]


def test_a_session_that_ends_says_that_the_work_is_done(start: Start) -> None:
    attempt = start()
    with slurmtrain.session() as session:
        for step in session.steps(3):
            if step == 2:
                # Too late to stop: this is the last step.
                os.kill(os.getpid(), signal.SIGTERM)
    assert (kinds(attempt)[-1], events(attempt)[-1]["step"]) == ("finished", 3)


def test_a_trainer_that_exits_with_success_when_it_is_asked_to_stop_does_not_count_as_done(start: Start) -> None:
    attempt = start()
    with pytest.raises(SystemExit), slurmtrain.session():
        os.kill(os.getpid(), signal.SIGTERM)
        raise SystemExit  # as Lightning does
    assert "finished" not in kinds(attempt)


@pytest.mark.parametrize("asked_to_stop", [False, True])
def test_a_script_that_leaves_its_loop_early_has_finished_that_step_and_is_done_unless_it_was_asked_to_stop(
    run: RunDir, start: Start, asked_to_stop: bool
) -> None:
    attempt = start()
    with slurmtrain.session() as session:
        session.checkpoint(counter=Counter())
        for step in session.steps(100):
            session.log(loss=step)
            if step == 4:
                if asked_to_stop:
                    os.kill(os.getpid(), signal.SIGTERM)
                break
    assert lines(attempt)[-1] == {"t": lines(attempt)[-1]["t"], "step": 5, "metrics": {"loss": 4}}
    assert steps_on_disk(run) == [5]
    assert ("finished" in kinds(attempt)) != asked_to_stop


def test_an_exception_saves_nothing_of_the_step_it_broke(run: RunDir, start: Start) -> None:
    attempt = start(every={"steps": 2})
    with pytest.raises(ZeroDivisionError), slurmtrain.session() as session:
        session.checkpoint(counter=Counter())
        for step in session.steps(100):
            session.log(loss=1 / (5 - step))
    assert steps_on_disk(run) == [2, 4]
    assert lines(attempt)[-1]["step"] == 5
    raised = next(event for event in events(attempt) if event["kind"] == "raised")
    assert raised["type"] == "ZeroDivisionError"


def test_a_run_whose_last_save_fails_has_failed(run: RunDir, start: Start) -> None:
    attempt = start(every={"steps": 1000})
    run.checkpoints.mkdir()
    (run.checkpoints / f".{attempt.path.name}-step-3").touch()
    with (
        pytest.raises(CheckpointError, match="its last checkpoint could not be saved"),
        slurmtrain.session() as session,
    ):
        session.checkpoint(counter=Counter())
        list(session.steps(3))


def test_an_attempt_that_another_has_replaced_publishes_nothing(run: RunDir, start: Start) -> None:
    attempt = start(every={"steps": 2})
    with pytest.raises(CheckpointError, match="another attempt has taken over"), slurmtrain.session() as session:
        session.checkpoint(counter=Counter())
        for step in session.steps(10):
            if step == 6:
                assert kinds(attempt).count("saved") == 2
                run.submission(9).path.mkdir()
                lease.grant(run.submission(9))
    assert steps_on_disk(run) == [2, 4]


def test_what_an_earlier_attempt_left_half_built_is_swept_away(run: RunDir, start: Start) -> None:
    litter = run.checkpoints / ".job0.0-step-7"
    litter.mkdir(parents=True)
    (litter / "state.pt").write_bytes(b"half")
    (run.checkpoints / ".trash-step-3").mkdir()
    start()
    with slurmtrain.session() as session:
        session.checkpoint(counter=Counter())
        list(session.steps(1))
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-1"]


def test_what_is_no_number_of_steps_no_metric_or_has_no_state_is_refused_by_name(start: Start) -> None:
    start()
    with slurmtrain.session() as session:
        for total in (-1, 2.5, True, "ten"):
            with pytest.raises(ValueError, match="whole number of steps"):
                list(session.steps(total))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="'words' must be one number, not str"):
            session.log(words="many")
        with pytest.raises(TypeError, match=r"'words' \(str\) cannot be saved: it has neither"):
            session.checkpoint(words="many")  # type: ignore[arg-type]


class Onlooker(Counter):
    """Something with a state that notes what the agent is told while it is saved and restored."""

    def __init__(self, board: Board) -> None:
        super().__init__()
        self.board = board
        self.phases: list[Phase] = []

    def now(self) -> tuple[Phase, int]:
        beat = self.board.read()[0]
        return beat.phase, beat.step

    def state_dict(self) -> dict[str, Any]:
        self.phases.append(self.now()[0])
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.phases.append(self.now()[0])
        super().load_state_dict(state)


@pytest.fixture
def onlooker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Onlooker]:
    board = Board(1)
    monkeypatch.setenv("SLURMTRAIN_HEARTBEAT", board.path)
    yield Onlooker(board)
    board.close()


def test_the_agent_is_told_what_a_session_does(start: Start, onlooker: Onlooker) -> None:
    start(every={"steps": 2})
    model = nn.Linear(1, 1)
    beats = []
    with slurmtrain.session() as session:
        assert onlooker.now() == (Phase.READY, 0)
        session.checkpoint(onlooker=onlooker, model=model)
        for _ in session.steps(3):
            beats.append(onlooker.now())
            model(torch.zeros(1))
        assert onlooker.now() == (Phase.READY, 3)
    assert beats == [(Phase.FIRST, 0), (Phase.TRAINING, 1), (Phase.TRAINING, 2)]
    assert onlooker.now() == (Phase.LEFT, 3)
    assert set(onlooker.phases) == {Phase.SAVING}
    beat = onlooker.board.read()[0]
    assert beat.pid == os.getpid()
    assert beat.step_s > 0
    assert beat.own_s > 0
    assert beat.save_s > 0


def test_a_restore_is_watched_as_a_save_and_a_stop_is_told(start: Start, onlooker: Onlooker) -> None:
    start()
    with slurmtrain.session() as session:
        session.checkpoint(onlooker=onlooker)
        for _ in session.steps(1):
            pass
    start()
    onlooker.phases.clear()
    with pytest.raises(SystemExit), slurmtrain.session() as session:
        session.checkpoint(onlooker=onlooker)
        assert onlooker.phases == [Phase.SAVING]
        for _ in session.steps(9):
            onlooker.phases.clear()
            os.kill(os.getpid(), signal.SIGTERM)
    assert onlooker.phases[-1] is Phase.STOPPING
    assert onlooker.now()[0] is Phase.LEFT


@pytest.mark.parametrize(
    ("agree_s", "hooked"),
    [(1e9, [2, 6, 14, 19]), (0.0, list(range(1, 20)))],
    ids=["ever more steps to the next agreement", "an agreement after each step"],
)
def test_what_a_script_compiles_is_compiled_once(
    start: Start, monkeypatch: pytest.MonkeyPatch, agree_s: float, hooked: list[int]
) -> None:
    compiled = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(interval, "AGREE_S", agree_s)
    start()
    model = nn.Linear(2, 2)
    forward = torch.compile(model, backend=backend)
    steps = []
    with slurmtrain.session() as session:
        session.checkpoint(model=model)
        for step in session.steps(20):
            if model._forward_hooks:
                steps.append(step)
            forward(torch.zeros(1, 2))
    assert len(compiled) == 1
    assert steps == hooked


def test_a_loop_over_a_loader_in_place_of_steps_is_refused_and_an_evaluation_within_a_step_is_not() -> None:
    with slurmtrain.session() as session:
        loader = session.loader(list(range(6)), 2)
        samples = [sorted(torch.cat(list(loader)).tolist()) for _, _ in session.steps(2, loader)]
        with pytest.raises(DataError, match=r"'for step, batch in run\.steps\(total, loader\)'"):
            list(zip(session.steps(9), loader, strict=False))
    assert samples == [list(range(6))] * 2


def test_backward_weighs_the_loss_of_a_batch_only_in_steps_of_its_loader() -> None:
    parameter = nn.Parameter(torch.ones(()))

    def gradient(session: Any) -> float:
        parameter.grad = None
        session.backward(2 * parameter)
        return float(parameter.grad)

    with slurmtrain.session() as session:
        loader = session.loader([1, 2, 3], 2)
        gradients = []
        for _ in session.steps(3, loader):
            session._shares.weight = 0.25
            gradients.append(gradient(session))
        gradients += [gradient(session) for _ in session.steps(4)]
        for _ in session.steps(6, loader):
            session._shares.weight = 0.5
            gradients.append(gradient(session))
            break
        gradients.append(gradient(session))
    assert gradients == [0.5, 0.5, 0.5, 2.0, 1.0, 2.0]


def test_the_weight_of_shared_samples_counts_in_their_step_alone() -> None:
    with slurmtrain.session() as session:
        loader = session.loader([1, 2, 3], 3)
        # Two of three ranks have a sample of two, this one is among them.
        session._shares.ranks = 3
        weights = []
        for step in session.steps(3):
            if step == 1:
                session.share([1, 2])
            weights.append(session.weight)
        for step, _ in session.steps(5, loader):
            if step == 4:
                session.share([1, 2])
            weights.append(session.weight)
        assert weights == [1.0, 1.5, 1.0, 1.0, 1.5]
        session.share([1, 2])
        assert [session.weight for _ in session.steps(7)] == [1.5, 1.5]
        assert [session.weight for _ in session.steps(9, loader)] == [1.0, 1.0]


def test_an_evaluation_leaves_the_step_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    phases, numbers = [], []

    def loss_of(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        phases.append((session._pulse.phase, model.training, output.requires_grad))
        return (output - targets).abs().mean() + torch.rand(()) + random.random() + np.random.random()

    with slurmtrain.session() as session:
        session._shares.ranks = 3
        for evaluates in (True, False):
            torch.manual_seed(1)
            random.seed(1)
            np.random.seed(1)
            for _ in session.steps(session.step + 1):
                session.share([1, 2])
                if evaluates:
                    batches = (session.share(torch.ones(size, 1), torch.ones(size, 1)) for size in (3, 4))
                    assert session.evaluate(model, loss_of, batches).isfinite()
                numbers.append((session.weight, torch.rand(()), random.random(), np.random.random()))
    assert phases == [(Phase.PAUSED, False, False)] * 2
    assert numbers[0] == numbers[1]
    assert numbers[0][0] == 1.5
    assert model.training


@pytest.mark.parametrize(("weight", "mean"), [(1.0, 3.0), (0.25, 3.0), (0.0, 0.0)])
def test_the_gradients_of_a_whole_step_are_weighted_and_its_mean_loss_is_not(weight: float, mean: float) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    with slurmtrain.session() as session:
        loader = session.loader([1, 2], 2)
        for _ in session.steps(1, loader):
            session._shares.weight = weight
            targets = torch.zeros(2, 1)
            loss = session.forward_backward(model, lambda out, _: out.mean(), torch.full((2, 1), 3.0), targets)
    assert loss.item() == pytest.approx(mean)
    assert model.weight.grad.item() == pytest.approx(3.0 * weight)


# --- ranks with unequal hardware tell each other what they have before they join --------------------------------------


def test_all_ranks_get_the_hardware_of_all_by_rank() -> None:
    ranks = [
        RankHardware(host="n1", name="NVIDIA A100-SXM4-80GB", has_gpu=True, library="NCCL", version="2.27.5"),
        RankHardware(host="n2", **describe_rank(torch.device("cpu"))),
        RankHardware(host="n2", name="Tesla V100-SXM2-16GB", has_gpu=True),
    ]
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as threads:
        gathered = threads.map(lambda number: exchange(store, number, 3, ranks[number]), range(3))
        assert list(gathered) == [ranks] * 3
    assert (ranks[1].name, ranks[1].has_gpu) == ("CPU", False)
