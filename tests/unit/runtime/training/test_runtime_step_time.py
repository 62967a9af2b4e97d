"""What a step takes of a rank's own time."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from slurmtrain.runtime.training.module_watch import StepTime, target_of

CPU = torch.device("cpu")


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


class Slow(nn.Module):
    """A model whose forward pass takes this many seconds."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.clock = clock
        self.seconds = seconds

    def forward(self) -> None:
        self.clock.now += self.seconds


def step(own: StepTime, clock: Clock, *parts: Callable[[], None] | float) -> None:
    own.begin()
    for part in parts:
        if isinstance(part, float):
            clock.now += part
        else:
            part()
    own.end()


def test_loading_and_the_first_forward_pass_are_a_ranks_own_time(clock: Clock) -> None:
    own, model = StepTime(CPU), Slow(clock, 2.0)
    own.watch([object(), model])
    step(own, clock, 1.0, model, 5.0, model, 7.0)
    assert own.s == 0, "a step's own time is known when the next begins"
    own.begin()
    assert own.s == 3.0


def test_the_time_is_smoothed_over_steps(clock: Clock) -> None:
    own, model = StepTime(CPU), Slow(clock, 1.0)
    own.watch([model])
    step(own, clock, model)
    step(own, clock, model, 100.0)
    step(own, clock, 1.0, model)
    own.begin()
    assert own.s == pytest.approx(0.8 * 1.0 + 0.2 * 2.0)


def test_a_step_without_a_forward_pass_changes_nothing(clock: Clock) -> None:
    own, model = StepTime(CPU), Slow(clock, 1.0)
    own.watch([model])
    step(own, clock, model)
    step(own, clock, 50.0)
    own.begin()
    assert own.s == 1.0


def test_only_a_step_that_is_measured_finds_hooks_on_the_model(clock: Clock) -> None:
    own, model = StepTime(CPU), Slow(clock, 1.0)
    own.watch([model])
    assert not model._forward_hooks
    own.begin()
    assert len(model._forward_hooks) == 1
    own.end()
    assert not model._forward_hooks
    model()
    own.begin()
    assert own.s == 0, "the pass was after the step's end"


def test_steps_that_are_measured_in_a_row_share_a_hook(clock: Clock) -> None:
    own, model = StepTime(CPU), Slow(clock, 1.0)
    own.watch([model])
    own.begin()
    hooks = dict(model._forward_hooks)
    own.begin()
    assert dict(model._forward_hooks) == hooks
    own.end()
    assert not model._forward_hooks


def test_a_copy_of_a_model_measures_nothing_and_needs_no_slurmtrain(clock: Clock) -> None:
    own, model = StepTime(CPU), nn.Linear(1, 1)
    own.watch([model])
    own.begin()
    clock.now += 1.0
    pickled = pickle.dumps(model)
    assert b"slurmtrain" not in pickled
    for other in (copy.deepcopy(model), pickle.loads(pickled)):
        other(torch.zeros(1))
    own.begin()
    assert own.s == 0


def test_without_a_model_nothing_is_known() -> None:
    own = StepTime(CPU)
    own.watch([object()])
    own.begin()
    own.begin()
    assert own.s == 0


def test_inside_a_compiled_function_nothing_is_measured(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    own, model = StepTime(CPU), Slow(clock, 1.0)
    own.watch([model])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    step(own, clock, model)
    own.begin()
    assert own.s == 0


class Event:
    """An event of a GPU that is as far as the test says; it passes when the GPU comes to what was recorded."""

    passed = False
    gpu = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self, _stream: object) -> None:
        self.at = Event.gpu

    def query(self) -> bool:
        return Event.passed

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


def test_on_a_gpu_a_time_is_taken_once_it_is_known_and_never_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    own, model = StepTime(torch.device("cuda", 0)), nn.Identity()
    own.watch([model])
    for passed, gpu, own_s in [(False, 1.0, 0.0), (False, 5.0, 0.0), (False, 6.0, 0.0), (True, 7.0, 1.0)]:
        Event.passed = passed
        own.begin()
        assert own.s == own_s
        Event.gpu = gpu
        model(0)
        Event.gpu += 0.5
        model(0)


def test_models_whose_forward_pass_waits_for_others_are_left_alone() -> None:
    class FSDPModule(nn.Module):
        """What ``fully_shard`` makes of a module has such a base."""

    plain = nn.Sequential(nn.Linear(1, 1))
    assert target_of(plain) is plain
    assert target_of(nn.Sequential(nn.SyncBatchNorm(1))) is None
    assert target_of(nn.Sequential(FSDPModule())) is None
    compiled_in_place = nn.Linear(1, 1)
    compiled_in_place._compiled_call_impl = lambda *_: None
    assert target_of(compiled_in_place) is None
