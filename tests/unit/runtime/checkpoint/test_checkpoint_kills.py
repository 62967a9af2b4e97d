"""SIGKILL at any instruction of a save: a good checkpoint stays, and the next attempt finds it, and no litter.

The files are tried at every point, without torch, each scenario with one of those who may continue; of whole ranks with
their writers a spread of points is tried. TEST_KILLS=all tries everything.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from helpers.killpoints import heal, until_gone, writers_that_fail
from helpers.save_scenarios import SUCCESSORS, scenarios_of

TESTS = Path(__file__).resolve().parents[3]
CASES = [(successor, name) for successor in SUCCESSORS for name in scenarios_of(successor)]


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kills() -> dict[str, dict[str, int | str]]:
    """How many kills each scenario took, or what went wrong, by who continues after that."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    command = [sys.executable, "-m", "helpers.save_scenarios"]
    running = {
        successor: subprocess.Popen([*command, successor], stdout=subprocess.PIPE, env=environ)
        for successor in SUCCESSORS
    }
    outputs = {successor: process.communicate()[0] for successor, process in running.items()}
    assert not any(process.returncode for process in running.values())
    return {successor: json.loads(text) for successor, text in outputs.items()}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("successor", "scenario"), CASES)
def test_whichever_process_is_killed_the_next_continues_from_a_good_checkpoint(
    kills: dict[str, dict[str, int | str]], successor: str, scenario: str
) -> None:
    assert isinstance(kills[successor][scenario], int), kills[successor][scenario]


def test_hundreds_of_kills_were_survived(kills: dict[str, dict[str, int | str]]) -> None:
    assert sum(n for scenarios in kills.values() for n in scenarios.values() if isinstance(n, int)) > 300


# --- whole ranks ------------------------------------------------------------------------------------------------------

STEPS = (1, 2, 3)


def _objects(step: int) -> dict[str, Any]:
    """A model and an optimizer, in which every value depends on the step."""
    import torch

    torch.manual_seed(step)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 30))
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(step))
    _set(model, optimizer, step)
    return {"model": model, "optimizer": optimizer}


def _set(model: Any, optimizer: Any, step: int) -> None:
    import torch

    torch.manual_seed(step)
    with torch.no_grad():
        model(torch.randn(4, 30))
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
            parameter.grad = torch.randn(parameter.shape)
    optimizer.step()
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] = float(step)


def _train(root: Path, ranks: Any) -> list[str]:
    """Save at each step; victim the saves ended."""
    from helpers.ranks import Attempt

    from slurmtrain.model.experiment.checkpoint import KeepSpec

    objects = _objects(0)
    with Attempt(root, ranks, objects, keep=KeepSpec(last=2)) as attempt:
        problems = []
        for step in STEPS:
            _set(**objects, step=step)
            (root / f"state-{ranks.rank}-{step}").write_bytes(_bytes(objects))
            problems.append(attempt.save(step))
        return problems


def _bytes(objects: dict[str, Any]) -> bytes:
    import torch

    from slurmtrain.runtime.checkpoint.state_dicts import Objects

    tensors = Objects(objects).capture().tensors
    return b"".join(bytes(tensors[name].reshape(-1).view(torch.uint8).tolist()) for name in sorted(tensors))


def _go_on(root: Path, ranks: Any) -> int:
    """A new attempt restores, bit for bit what was saved, and saves; the step that it went on from."""
    from helpers.ranks import Attempt, listed

    from slurmtrain.runtime.checkpoint import checkpoint_files

    objects = _objects(99)
    with Attempt(root, ranks, objects, restart=1) as attempt:
        if ranks.rank == 0:
            checkpoint_files.sweep(attempt.run.checkpoints, attempt.attempt.path.name)
        restored = attempt.restore()
        step = restored.step if restored is not None else 0
        if step:
            assert _bytes(objects) == (root / f"state-{ranks.rank}-{step}").read_bytes(), "it is a mixture"
            assert objects["optimizer"].param_groups[0]["lr"] == step
            assert restored is not None
            assert restored.lost_steps == 0
        assert attempt.events("rejected") == []
        assert attempt.save(step + 1) == ""
    # The writer prunes while training goes on; it has done so when the attempt is over.
    if ranks.rank == 0:
        assert all(name.startswith("step-") for name in listed(root)), listed(root)
    return step


def _in_a_fork(connection: Connection, root: Path, points: list[tuple[int, str]]) -> None:
    """For each point: a rank trains in a process of its own until a process is killed, and another one continues."""
    import torch
    from helpers.ranks import alone

    torch.set_num_threads(1)
    results = {}
    for number, victim in points:
        place = root / f"{victim}-{number}"
        place.mkdir()
        os.environ |= writers_that_fail(place / "fault", place, effect="", number=number, action=victim)
        status = _forked(lambda place=place: _note(place, _train(place, alone())))
        heal(place / "fault")
        until_gone(place / "fault")
        went_on = _forked(lambda place=place: (place / "from").write_text(str(_go_on(place, alone()))))
        step = int((place / "from").read_text()) if (place / "from").exists() else -1
        problems = json.loads((place / "problems").read_text()) if (place / "problems").exists() else None
        results[f"{victim} {number}"] = (status, problems, went_on, step)
    connection.send(results)


def _note(place: Path, problems: list[str]) -> None:
    (place / "problems").write_text(json.dumps(problems))


def _forked(work: Any) -> int:
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:  # noqa: BLE001 (nothing of the parent's may run here)
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def _points(effects: int) -> list[tuple[int, str]]:
    if os.environ.get("TEST_KILLS") == "all":
        return [(number, victim) for victim in ("writer", "rank", "both") for number in range(1, effects + 1)]
    # The three saves have about 17, 17 and 26 effects; the last prunes.
    writer, rank, both = (33,), (40,), (16,)
    return [(n, victim) for victim, numbers in (("writer", writer), ("rank", rank), ("both", both)) for n in numbers]


@pytest.mark.timeout(3600)
def test_after_a_kill_of_a_rank_or_its_writer_the_run_continues_bit_for_bit(tmp_path: Path) -> None:
    from helpers.ranks import preloaded_context

    context = preloaded_context()
    ours, theirs = context.Pipe()
    points = _points(64)
    process = context.Process(target=_in_a_fork, args=(theirs, tmp_path, points))
    process.start()
    theirs.close()
    results = ours.recv()
    process.join()
    assert len(results) == len(points)
    for point, (status, problems, went_on, step) in results.items():
        assert went_on == 0, point
        if point.startswith("writer"):
            # Training has gone on: one save has failed, at most, and the others are there.
            assert status == 0, point
            failed = [STEPS[i] for i, problem in enumerate(problems) if problem]
            assert len(failed) <= 1, (point, problems)
            assert all("killed by signal 9" in problem for problem in problems if problem), problems
            assert step == max(set(STEPS) - set(failed)), (point, failed)
        else:
            assert status in (0, signal.SIGKILL), point
            if status == 0:
                assert step == STEPS[-1], point
            published_before = [s for s in STEPS if (tmp_path / point.replace(" ", "-") / f"state-0-{s}").exists()]
            # The one that was being saved, or the one before it.
            assert step >= max(published_before, default=0) - 1, (point, step)
    assert any(status == signal.SIGKILL for status, *_ in results.values())


def _lose_a_rank(ranks: Any, root: Path, victim: int, effect: str, number: int) -> None:
    """Save on two ranks, until one and its writer die."""
    if ranks.rank == victim:
        os.environ |= writers_that_fail(root / "fault", root, effect=effect, number=number, action="both")
    _train(root, ranks)


LOST = [(0, "os.rename", 4), (1, "half a write", 2)]


@pytest.mark.parametrize(("victim", "effect", "number"), LOST if os.environ.get("TEST_KILLS") == "all" else LOST[:1])
def test_what_two_ranks_leave_when_one_is_killed_is_whole(
    tmp_path: Path, victim: int, effect: str, number: int
) -> None:
    """The renames of a save are those of its manifest and of its directory: the fourth kill is within the second."""
    from helpers.ranks import Pair, alone, listed

    from slurmtrain.runtime.checkpoint import checkpoint_files

    pair = Pair()
    with pytest.raises(AssertionError, match=f"rank {victim}: no answer"):
        pair.run(_lose_a_rank, tmp_path, victim, effect, number)
    pair.close()
    assert "step-1" in listed(tmp_path)
    step = _go_on(tmp_path, alone())
    # A manifest is written last: with it the second is complete, and lacked its name alone.
    assert step == (2 if effect == "os.rename" else 1)
    for path in checkpoint_files.published(tmp_path / "checkpoints"):
        manifest = checkpoint_files.read_manifest(path)
        checkpoint_files.verify_files(path, manifest, manifest.files)
