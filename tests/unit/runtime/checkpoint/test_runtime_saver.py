"""What a save costs and leaves, how plain torch reads it, and what cannot be saved."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.object_states import (
    Counter,
    comparable,
    ddp,
    differing,
    fsdp,
    network,
    plain,
    raw,
    save_as,
    states,
    train,
    two_modules,
)
from helpers.ranks import Attempt, Pair, alone, listed
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh

from slurmtrain.errors import CheckpointError
from slurmtrain.model.experiment.checkpoint import BestSpec, KeepSpec
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.runtime.checkpoint import checkpoint_files
from slurmtrain.runtime.checkpoint.saver import Publisher, PublishPolicy
from slurmtrain.runtime.checkpoint.shard_plan import Sharding
from slurmtrain.runtime.checkpoint.torch_index import Index
from slurmtrain.runtime.checkpoint.writer_client import ShardWriter
from slurmtrain.runtime.checkpoint.writer_process import IGNORED, keep_of
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.system.files import make_directory, write_json
from slurmtrain.system.journal import Journal

# --- what a save costs, and what it leaves ----------------------------------------------------------------------------


def count_plans(ranks: RankGroup, root: Path) -> list[int]:
    """How often ranks have planned after each of some saves; before the last the model has got another buffer."""
    planned = [0]
    plan = Sharding.plan

    def counting(self: Sharding, state: Mapping[str, Any], parameters: Collection[str] = ()) -> None:
        planned[0] += 1
        plan(self, state, parameters)

    Sharding.plan = counting  # type: ignore[method-assign]
    try:
        objects = ddp(0, ranks)
        counts = []
        with Attempt(root, ranks, objects) as attempt:
            attempt.saver.prepare()
            for step in range(1, 5):
                if step == 4 and ranks.rank == 1:
                    objects["model"].module.register_buffer("late", torch.ones(2))
                if step == 4 and ranks.rank == 0:
                    objects["model"].module.register_buffer("late", torch.ones(2))
                train(objects["model"], objects["optimizer"])
                assert attempt.save(step) == ""
                counts.append(planned[0])
        return counts
    finally:
        Sharding.plan = plan  # type: ignore[method-assign]


def test_ranks_plan_once_until_the_state_changes(tmp_path: Path, pair: Pair) -> None:
    assert pair.run(count_plans, tmp_path) == [[1, 1, 1, 2]] * 2


def save_wide(ranks: RankGroup, root: Path) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    with Attempt(root, ranks, {"model": nn.parallel.DistributedDataParallel(model)}) as attempt:
        assert attempt.save(1) == ""


def test_what_all_ranks_have_is_written_by_each_in_part(tmp_path: Path, pair: Pair) -> None:
    pair.run(save_wide, tmp_path)
    manifest = checkpoint_files.read_manifest(tmp_path / "checkpoints" / "step-1")
    first, second = (manifest.files[f"__{rank}_0.distcp"][0] for rank in (0, 1))
    tensors = 8 * (64 * 64 + 64) * 4
    assert abs(first - second) < 0.2 * tensors
    # Each holds, beside its tensors, what they are framed with and the state of its generators.
    assert tensors < first + second < tensors + 100_000


def save_while_training(ranks: RankGroup, root: Path) -> list[str]:
    """In what a state that was restored differs from that of when the save began, after which training went on."""
    objects = fsdp(0, ranks)
    with Attempt(root, ranks, objects) as attempt:
        expected = states(objects)
        assert attempt.begin(1) is None
        train(objects["model"], objects["optimizer"])
        outcome = attempt.saver.finish()
        assert outcome is not None
        assert outcome.problem == ""
    again = fsdp(1, ranks)
    with Attempt(root, ranks, again, restart=1) as attempt:
        assert attempt.restore() is not None
        return differing(expected, states(again))


def test_what_training_does_during_a_save_is_not_in_it(tmp_path: Path, pair: Pair) -> None:
    assert list(pair.run(save_while_training, tmp_path)) == [[], []]


# --- plain torch reads it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["fsdp", "ddp"])
def test_plain_torch_loads_a_published_checkpoint(tmp_path: Path, pair: Pair, make: str) -> None:
    [before, _] = pair.run(save_as, tmp_path, make)
    directory = tmp_path / "checkpoints" / "step-1"
    model = network(1)
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    assert differing(before["model"], comparable(model.state_dict())) == []


def test_torchs_own_converter_makes_one_file_of_a_checkpoint(tmp_path: Path, pair: Pair) -> None:
    [before, _] = pair.run(save_as, tmp_path, "fsdp")
    dcp_to_torch_save(tmp_path / "checkpoints" / "step-1", tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    tensors = {name.removeprefix("model."): value for name, value in loaded.items() if name.startswith("model.")}
    assert differing(before["model"], comparable(tensors)) == []
    assert loaded["shared"]["optimizer"]["param_groups"][0]["lr"] == 0.1
    assert sorted(name for name in loaded if name.startswith("ranks.")) == ["ranks.0", "ranks.1"]


def test_the_index_has_everything_that_is_in_the_files(tmp_path: Path) -> None:
    objects = two_modules(0, alone())
    with Attempt(tmp_path, alone(), objects) as attempt:
        assert attempt.save(1) == ""
    index = Index(tmp_path / "checkpoints" / "step-1")
    tensors = index.empty(index.shapes())
    index.read(tensors)
    expected = {f"{part}.{name}": value for part in ("encoder", "decoder")
                for name, value in objects[part].state_dict().items()}  # fmt: skip
    assert differing(comparable(expected), {name: raw(tensors[name]) for name in expected}) == []
    assert all(name.startswith("optimizer.state.") for name in tensors.keys() - expected.keys())


# --- what cannot be saved ---------------------------------------------------------------------------------------------


def save_sharded_object(ranks: RankGroup, root: Path) -> str:
    mesh = init_device_mesh("cpu", (ranks.world_size,))
    from torch.distributed.tensor import Shard, distribute_tensor

    sharded = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with Attempt(root, ranks, {"average": Counter({"deep": [{"t": sharded}]})}) as attempt:
        with pytest.raises(CheckpointError) as error:
            attempt.begin(1)
        assert attempt.saver.step is None
    return str(error.value)


def test_an_object_with_a_sharded_tensor_is_refused_by_name(tmp_path: Path, pair: Pair) -> None:
    first, second = pair.run(save_sharded_object, tmp_path)
    assert first == second
    assert "'average' has a tensor that is sharded over ranks (DTensor)" in first
    assert "register the module too" in first
    assert listed(tmp_path) == []


LOCAL = "a function of the test"


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"x": object()}, "cannot be loaded with weights_only=True"),
        ({"x": Path("x")}, "cannot be loaded with weights_only=True"),
        ({"x": {1: [Counter]}}, "cannot be loaded with weights_only=True"),
        (LOCAL, r"contains a value that cannot be saved: Can't (pickle|get) local object"),
    ],
)
def test_a_state_that_cannot_be_loaded_safely_or_pickled_is_refused_at_the_first_save(
    tmp_path: Path, state: Any, problem: str
) -> None:
    counter = Counter((lambda: None) if state is LOCAL else state)
    with Attempt(tmp_path, alone(), {"counter": counter}) as attempt, pytest.raises(CheckpointError, match=problem):
        attempt.save(1)
    assert listed(tmp_path) == []


@pytest.mark.parametrize("obj", [3, "text", object(), None])
def test_an_object_without_a_state_is_refused_by_name(tmp_path: Path, obj: object) -> None:
    with pytest.raises(TypeError, match=r"'thing' \(\w+\) cannot be saved: it has neither"):
        Attempt(tmp_path, alone(), {"thing": obj}, lease=False)


@pytest.mark.parametrize("stalls", [False, True])
def test_waiting_for_a_save_is_a_stall_only_where_training_goes_on_after_it(tmp_path: Path, stalls: bool) -> None:
    with Attempt(tmp_path, alone(), plain(0, alone())) as attempt:
        assert attempt.begin(1) is None
        begun = attempt.saver._save
        assert begun is not None
        before = begun.stall_s
        outcome = attempt.saver.finish(stalls=stalls)
    assert outcome is not None
    assert (outcome.stall_s > before) is stalls


# --- room for a checkpoint: what is let go for it, what is warned of, and what is refused -----------------------------


SIZE = 1000


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    attempt = RunDir(tmp_path).attempt("1", 0)
    attempt.path.mkdir(parents=True)
    write_json(attempt.run.lease, {"submission": 1, "attempt": "1.0"})
    for step in (1, 2, 3):
        staging = checkpoint_files.Staging(attempt.run.checkpoints, "1.0", step)
        (make_directory(staging.path) / "__0_0.distcp").write_bytes(bytes(SIZE))
        manifest = checkpoint_files.Manifest(
            step=step, world_size=1, saved_at=0.0, seconds=0.0, stall_s=0.0, plan_hash=None, attempt="1.0",
            why="steps", files={"__0_0.distcp": (SIZE, "")}, metrics={"loss": float(step)},
        )  # fmt: skip
        staging.publish(manifest)
    return attempt


@contextlib.contextmanager
def open_publisher(attempt: AttemptDir, **policy: Any) -> Iterator[Publisher]:
    writer = ShardWriter()
    with Journal(attempt.rank_journal(0)) as journal:
        yield Publisher(attempt, PublishPolicy(**policy), 1, writer, journal)
    writer.close()


def events(attempt: AttemptDir) -> list[tuple[str, Any]]:
    lines = [json.loads(line) for line in attempt.rank_journal(0).read_text().splitlines()]
    return [(line["kind"], line.get("step")) for line in lines]


def checkpoint_names(attempt: AttemptDir) -> list[str]:
    return sorted(path.name for path in attempt.run.checkpoints.iterdir())


def free(monkeypatch: pytest.MonkeyPatch, attempt: AttemptDir, room: int) -> None:
    """A disk with room for so many bytes beside the three checkpoints."""

    def statvfs(_: Path) -> SimpleNamespace:
        used = SIZE * len(checkpoint_files.published(attempt.run.checkpoints))
        return SimpleNamespace(f_bavail=room + 3 * SIZE - used, f_frsize=1, f_files=0)

    monkeypatch.setattr(os, "statvfs", statvfs)


def nothing() -> None:
    """Nothing is unanswered."""


def test_a_full_disk_is_relieved_of_no_more_than_is_needed(
    attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, attempt, SIZE // 2)
    with open_publisher(attempt, keep=KeepSpec(last=1)) as rank_0:
        assert rank_0.no_room(SIZE, nothing) == ""
    assert checkpoint_names(attempt) == ["step-2", "step-3"]
    assert events(attempt) == [("pruned", 1)]


def test_what_does_not_fit_is_refused_with_figures(attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, attempt, SIZE // 2)
    with open_publisher(attempt, keep=KeepSpec(last=2)) as rank_0:
        refused = rank_0.no_room(20_000_000_000, nothing)
    assert refused == f"it needs 20.00 GB, but only 0.00 MB are free in {attempt.run.checkpoints}"
    assert checkpoint_names(attempt) == ["step-2", "step-3"]


def test_a_quota_lets_go_of_what_the_policy_allows_and_is_then_warned_of_once(
    attempt: AttemptDir, caplog: pytest.LogCaptureFixture
) -> None:
    with open_publisher(attempt, keep=KeepSpec(last=2), quota=2 * SIZE) as rank_0:
        assert [rank_0.no_room(SIZE, nothing), rank_0.no_room(SIZE, nothing)] == ["", ""]
    assert checkpoint_names(attempt) == ["step-2", "step-3"]
    assert events(attempt) == [("pruned", 1), ("over_quota", None)]
    assert len([record for record in caplog.records if "checkpoint.quota" in record.message]) == 1


def test_a_writer_outlives_what_slurm_sends_before_it_has_begun() -> None:
    writer = ShardWriter()
    writer.order("populate", bytes=SIZE)
    assert writer._process is not None
    for number in IGNORED:
        writer._process.send_signal(number)
    assert "error" not in writer.wait()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()).isdisjoint(IGNORED)
    writer.close()


@pytest.mark.parametrize(
    "keep", [KeepSpec(), KeepSpec(last=1, every_steps=5), KeepSpec(best=BestSpec(metric="a", mode="max", n=2))]
)
def test_the_policy_comes_over_the_socket_as_it_is(keep: KeepSpec) -> None:
    from dataclasses import asdict

    assert keep_of(json.loads(json.dumps(asdict(keep)))) == keep
