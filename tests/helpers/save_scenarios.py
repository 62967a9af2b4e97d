"""Small saves, prunings and sweeps that are killed before each of their effects.

``python -m helpers.save_scenarios SUCCESSOR`` tries :data:`SCENARIOS` and prints how many kills each took. It imports
no torch, so that forking it is safe and fast.
"""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from helpers.killpoints import kill_at, watch
from slurmtrain.model.experiment.checkpoint import BestSpec, KeepSpec, Saved, reasons_to_keep
from slurmtrain.model.run.layout import AttemptDir, RunDir, checkpoint_step
from slurmtrain.runtime.checkpoint import checkpoint_files, writer_process
from slurmtrain.system.files import make_directory, write_json

# --- small checkpoints without torch ----------------------------------------------------------------------------------

FIRST, NEXT, LAST = "1.0", "1.1", "1.2"
# Who continues after a kill: another process of the same attempt, the next attempt, or the one after that.
SUCCESSORS = ("writer", "attempt", "two attempts")


def content(step: int, rank: int, life: int = 0) -> bytes:
    """The content that a rank saves at a step; ``life`` distinguishes saves of the same step."""
    return random.Random(f"{step}/{rank}/{life}").randbytes(3_000 + 500 * rank)


@dataclass(frozen=True, slots=True)
class Save:
    """One save by all ranks, and the pruning after it."""

    step: int
    ranks: int = 1
    keep: KeepSpec = field(default_factory=lambda: KeepSpec(last=3))
    life: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)

    def do(self, run: RunDir, attempt: str) -> None:
        self.publish(run, attempt, [self.write(run, attempt, rank) for rank in range(self.ranks)])
        prune(run, attempt, self.keep)

    def write(self, run: RunDir, attempt: str, rank: int) -> dict[str, Any]:
        """Do what a rank's writer does; return its answer."""
        data = content(self.step, rank, self.life)
        handle = os.memfd_create("test")
        os.truncate(handle, len(data))
        os.pwrite(handle, data, 0)
        try:
            path = checkpoint_files.Staging(run.checkpoints, attempt, self.step).path / f"__{rank}_0.distcp"
            return writer_process._Memory(handle).write({"bytes": len(data), "path": str(path)})
        finally:
            os.close(handle)

    def publish(self, run: RunDir, attempt: str, written: list[dict[str, Any]]) -> dict[str, Any]:
        manifest = {
            "step": self.step, "why": "steps", "metrics": dict(self.metrics), "world_size": self.ranks, "mesh": [],
            "stall_s": 0.0, "plan_hash": None, "attempt": attempt, "versions": {}, "params": {}, "objects": {},
        }  # fmt: skip
        return writer_process.publish(
            {
                "attempt": str(AttemptDir(run.attempts / attempt).path),
                "step": self.step,
                "files": {
                    f"__{rank}_0.distcp": (answer["bytes"], answer["xxh3_128"]) for rank, answer in enumerate(written)
                },
                "index": (".metadata", base64.b64encode(f"index {self.step} {self.life}".encode()).decode()),
                "manifest": manifest,
                "began": time.monotonic(),
            }
        )


def prune(run: RunDir, attempt: str, keep: KeepSpec, missing: int | None = None) -> None:
    place = str(AttemptDir(run.attempts / attempt).path)
    writer_process.prune_as_ordered({"attempt": place, "keep": asdict(keep), "missing": missing})


def discard(run: RunDir, attempt: str, step: int) -> None:
    checkpoint_files.Staging(run.checkpoints, attempt, step).discard()


def take_lease(run: RunDir, attempt: str) -> None:
    write_json(run.lease, {"submission": 1, "attempt": attempt})


def spoil(run: RunDir, step: int) -> None:
    """Flip a bit of a checkpoint."""
    path = run.checkpoints / f"step-{step}" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[100] ^= 4
    path.write_bytes(data)


def check(directory: Path, lives: int = 2) -> None:
    """Raises AssertionError unless a checkpoint is bit for bit one that was saved, with no extra content."""
    manifest = checkpoint_files.read_manifest(directory)
    checkpoint_files.verify_files(directory, manifest, manifest.files)
    names = {entry.name for entry in directory.iterdir()}
    assert names == {*manifest.files, checkpoint_files.MANIFEST}, (directory.name, names)
    assert checkpoint_step(directory.name) == manifest.step
    parts = [(directory / f"__{rank}_0.distcp").read_bytes() for rank in range(manifest.world_size)]
    saved = [[content(manifest.step, rank, life) for rank in range(manifest.world_size)] for life in range(lives)]
    assert parts in saved, f"{directory.name} is a mixture"


def good(run: RunDir, spoiled: frozenset[int]) -> dict[int, bytes]:
    """The published checkpoints by step, with the content of rank 0; each is checked unless it was spoiled."""
    contents = {}
    for path in checkpoint_files.published(run.checkpoints):
        step = checkpoint_step(path.name)
        assert step is not None
        if step not in spoiled or _is_good(path):
            check(path)
            contents[step] = (path / "__0_0.distcp").read_bytes()
    return contents


def _is_good(path: Path) -> bool:
    try:
        check(path)
    except Exception:  # noqa: BLE001 (a damaged checkpoint may raise anything)
        return False
    return True


# --- scenarios --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scenario:
    """``before`` exists when ``act`` begins, which is killed; then an attempt makes the save ``after``."""

    before: tuple[Save, ...]
    act: Callable[[RunDir], None]
    after: Save
    spoiled: frozenset[int] = frozenset()
    prepare: Callable[[RunDir], None] | None = None
    acting: tuple[int, ...] = ()
    """The steps that ``act`` saves; a save that it was killed in is given up if its attempt continues."""
    lives_on: bool = True
    """Whether the killed attempt could continue."""


def _third(keep: KeepSpec, *, ranks: int = 1, metrics: tuple[float, ...] = ()) -> Scenario:
    """Two or more exist, another is saved, and the policy drops one."""
    losses = metrics or (1.0, 2.0, 3.0, 4.0)
    before = tuple(Save(10 * (i + 1), ranks, keep, metrics={"loss": loss}) for i, loss in enumerate(losses[:-2]))
    new = Save(10 * (len(before) + 1), ranks, keep, metrics={"loss": losses[-2]})
    after = Save(10 * (len(before) + 2), ranks, keep, metrics={"loss": losses[-1]})
    return Scenario(before, lambda run: new.do(run, FIRST), after, acting=(new.step,))


def _again(steps: tuple[int, ...], ranks: int = 1) -> Scenario:
    """The last of these steps is saved again."""
    new = Save(steps[-1], ranks, life=1)
    before = tuple(Save(step, ranks) for step in steps)
    return Scenario(before, lambda run: new.do(run, FIRST), Save(steps[-1] + 1, ranks), acting=(new.step,))


def _put_aside(asides: int) -> Scenario:
    """A damaged one is set aside, next to others like it, and later pruned."""

    def act(run: RunDir) -> None:
        checkpoint_files.set_aside(run.checkpoints / "step-2")
        Save(3).do(run, FIRST)

    def prepare(run: RunDir) -> None:
        for number in range(asides):
            make_directory(run.checkpoints / checkpoint_files.damaged_name(2, number)).joinpath("x").write_bytes(b"x")

    return Scenario((Save(1), Save(2)), act, Save(4), frozenset({2}), prepare, acting=(3,))


def _pruned(missing: int, keep: KeepSpec) -> Scenario:
    """This many bytes are freed before a save."""

    def act(run: RunDir) -> None:
        prune(run, FIRST, keep, missing)

    return Scenario(tuple(Save(step, keep=KeepSpec(last=9)) for step in (1, 2, 3, 4)), act, Save(5, keep=keep))


def _discarded() -> Scenario:
    """A save is given up after both ranks have written; the next one succeeds."""
    failing, fine = Save(2, 2), Save(3, 2)

    def act(run: RunDir) -> None:
        for rank in range(2):
            failing.write(run, FIRST, rank)
        discard(run, FIRST, 2)
        fine.do(run, FIRST)

    return Scenario((Save(1, 2),), act, Save(4, 2), acting=(2, 3))


def _swept() -> Scenario:
    """An earlier attempt has left some of every kind of leftover; the sweep is killed."""

    def prepare(run: RunDir) -> None:
        take_lease(run, "0.9")
        half, whole, older = Save(3), Save(4), Save(2, life=1)
        half.write(run, "0.9", 0)
        for save in (whole, older):
            staged = checkpoint_files.Staging(run.checkpoints, "0.9", save.step).path
            save.publish(run, "0.9", [save.write(run, "0.9", 0)])
            target = run.checkpoints / f"step-{save.step}"
            if save is older:
                target.rename(staged)
                Save(2).do(run, "0.9")
            else:
                target.rename(staged)
        (run.checkpoints / "step-1").rename(run.checkpoints / checkpoint_files.trash_name("step-1"))
        take_lease(run, FIRST)

    return Scenario(
        (Save(1), Save(2)),
        lambda run: checkpoint_files.sweep(run.checkpoints, FIRST),
        Save(5),
        prepare=prepare,
        lives_on=False,
    )


def _deleted() -> Scenario:
    """Checkpoints are deleted, including one that was set aside."""

    def act(run: RunDir) -> None:
        checkpoint_files.delete_checkpoint(run.checkpoints / "step-1")
        checkpoint_files.delete_checkpoint(checkpoint_files.set_aside(run.checkpoints / "step-3"))

    return Scenario((Save(1), Save(2), Save(3)), act, Save(4), frozenset({3}))


def _fenced() -> Scenario:
    """Another attempt has the lease: the written files are removed, and nothing is published."""
    zombie = Save(2, life=1)

    def act(run: RunDir) -> None:
        written = [zombie.write(run, "0.9", 0)]
        assert "fenced" in zombie.publish(run, "0.9", written)

    return Scenario((Save(1), Save(2)), act, Save(3), lives_on=False)


def _drawn(seed: int) -> Scenario:
    """A scenario drawn at random."""
    draw = random.Random(seed)
    best = (
        BestSpec(metric="loss", mode=draw.choice(["min", "max"]), n=draw.randint(1, 2)) if draw.random() < 0.5 else None
    )
    keep = KeepSpec(last=draw.randint(1, 3), every_steps=draw.choice([None, 2, 3, 5]), best=best)
    steps = sorted(draw.sample(range(1, 20), draw.randint(2, 6)))
    saves = [Save(step, draw.randint(1, 2), keep, metrics={"loss": draw.random()}) for step in steps]
    new = saves[-1] if draw.random() < 0.7 else Save(saves[-2].step, 1, keep, life=1, metrics={"loss": draw.random()})
    after = Save(steps[-1] + draw.randint(1, 3), draw.randint(1, 2), keep, metrics={"loss": draw.random()})
    return Scenario(tuple(saves[:-1]), lambda run: new.do(run, FIRST), after, acting=(new.step,))


SCENARIOS: dict[str, Scenario] = {
    "the first save": Scenario((), lambda run: Save(1).do(run, FIRST), Save(2), acting=(1,)),
    "the first save of two ranks": Scenario((), lambda run: Save(1, 2).do(run, FIRST), Save(2, 2), acting=(1,)),
    "the third save, of which two are kept": _third(KeepSpec(last=2)),
    "the third save of two ranks": _third(KeepSpec(last=2), ranks=2),
    "a save of which only the newest is kept": _third(KeepSpec(last=1)),
    "a save that keeps every second": _third(KeepSpec(last=1, every_steps=20)),
    "a save that keeps the best": _third(
        KeepSpec(last=1, best=BestSpec(metric="loss", mode="min", n=2)), metrics=(1.0, 3.0, 2.0, 5.0, 0.5)
    ),
    "the same step again": _again((1, 2)),
    "the same and only step again": _again((2,), ranks=2),
    "a damaged one put aside": _put_aside(0),
    "another damaged one put aside": _put_aside(2),
    "room for one": _pruned(3_000, KeepSpec(last=2)),
    "room for more than there is": _pruned(10**9, KeepSpec(last=1)),
    "a save that is given up": _discarded(),
    "a sweep": _swept(),
    "deleting": _deleted(),
    "a save of a lost attempt": _fenced(),
    **{f"any save, drawn with {seed}": _drawn(seed) for seed in range(8)},
}


# --- kill everywhere --------------------------------------------------------------------------------------------------


def try_everywhere(scenario: Scenario, successor: str, place: Path) -> int:
    """Kill a scenario before each of its effects, and check what is left; return the number of kills.

    ``successor`` continues: one of :data:`SUCCESSORS`. With two attempts, the first is killed too, at some point.
    """
    base = RunDir(place / "base")
    make_directory(base.checkpoints)
    take_lease(base, FIRST)
    for save in scenario.before:
        save.do(base, FIRST)
    for step in scenario.spoiled:
        spoil(base, step)
    if scenario.prepare is not None:
        scenario.prepare(base)
    before = good(base, scenario.spoiled)
    draw = random.Random(0)
    kills = number = 0
    killed = True
    while killed:
        number += 1
        run = RunDir(place / f"killed-{number}")
        shutil.copytree(base.path, run.path)
        again = draw.randint(1, 30) if successor == "two attempts" else 0
        try:
            killed = _killed(lambda run=run: scenario.act(run), run, number)
            kills += killed
            _check_published(scenario, run, before)
            if again:
                kills += _killed(lambda run=run: _continue(scenario, run, NEXT), run, again)
                _check_published(scenario, run, before)
            _check_after(scenario, run, before, successor)
        except Exception as error:
            left = sorted(str(path.relative_to(run.path)) for path in run.path.rglob("*"))
            where = f"before effect {number}" + (f" and {again}" if again else "")
            raise AssertionError(f"killed {where}: {error!r}; left: {left}") from error
        shutil.rmtree(run.path)
    return kills


def _killed(act: Callable[[], None], run: RunDir, number: int) -> bool:
    """Let another process do it and die before its ``number``-th effect; return whether it came that far."""
    child = os.fork()
    if not child:
        try:
            watch(kill_at(number), str(run.path))
            act()
        except BaseException as error:  # noqa: BLE001 (nothing of the parent's may run here)
            sys.stderr.write(f"{error!r}\n")
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL


def _continue(scenario: Scenario, run: RunDir, attempt: str) -> None:
    """What an attempt does: sweep, and save."""
    if attempt != FIRST:
        take_lease(run, attempt)
        checkpoint_files.sweep(run.checkpoints, attempt)
    scenario.after.do(run, attempt)


def _check_published(scenario: Scenario, run: RunDir, before: Mapping[int, bytes]) -> None:
    """Everything published is good, and there still is a checkpoint if there was one."""
    published = good(run, scenario.spoiled)
    if not set(scenario.acting) & set(before):
        assert published or not before, "no checkpoint was left"


def _check_after(scenario: Scenario, run: RunDir, before: Mapping[int, bytes], successor: str) -> None:
    attempt = {"writer": FIRST, "attempt": NEXT, "two attempts": LAST}[successor]
    if successor == "writer":
        # What rank 0 does if its writer is gone.
        for step in scenario.acting:
            checkpoint_files.Staging(run.checkpoints, FIRST, step).finish()
    else:
        checkpoint_files.sweep(run.checkpoints, attempt)
    published = good(run, scenario.spoiled)
    assert published or not before, "no checkpoint was left"
    _continue(scenario, run, attempt)
    now = good(run, scenario.spoiled)
    after = scenario.after
    assert now[after.step] == content(after.step, 0, after.life)
    metrics = {save.step: save.metrics for save in scenario.before}
    metrics |= {step: checkpoint_files.read_manifest(run.checkpoints / f"step-{step}").metrics for step in now}
    spoiled = [step for step in scenario.spoiled if (run.checkpoints / f"step-{step}").exists()]
    candidates = [Saved(step, metrics.get(step, {})) for step in {*published, after.step, *spoiled}]
    kept = reasons_to_keep(candidates, after.keep)
    left = sorted(entry.name for entry in run.checkpoints.iterdir())
    assert left == sorted(f"step-{step}" for step in kept), f"{left} instead of {sorted(kept)}"


def scenarios_of(successor: str) -> list[str]:
    """The scenarios in which this one of :data:`SUCCESSORS` continues: all that it can, or every third one."""
    able = [name for name in SCENARIOS if successor != "writer" or SCENARIOS[name].lives_on]
    return able if os.environ.get("TEST_KILLS") == "all" else able[SUCCESSORS.index(successor) :: len(SUCCESSORS)]


def main(successor: str, *names: str) -> None:
    """Try scenarios, by default those of :func:`scenarios_of`; print how many kills each took, or what failed."""
    # More writes of less, so that there are more places to be killed at.
    writer_process._CHUNK = 1 << 10
    memory = Path("/dev/shm")
    results: dict[str, int | str] = {}
    for name in names or scenarios_of(successor):
        with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as place:
            try:
                results[name] = try_everywhere(SCENARIOS[name], successor, Path(place))
            except AssertionError as error:
                results[name] = str(error)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
