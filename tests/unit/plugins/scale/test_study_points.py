"""What each run of a scaling study sets."""

from __future__ import annotations

from typing import Any

import pytest

from slurmtrain.errors import UserError
from slurmtrain.model.experiment.kinds import Section, read_all
from slurmtrain.model.experiment.spec import Spec, write_spec
from slurmtrain.model.experiment.strategy import StrategySpec
from slurmtrain.plugins.scale.study_points import (
    BY_SPEED,
    MIXED,
    ONE_KIND,
    BatchKey,
    StudyRequest,
    describe_strategy,
    find_batch,
    hardware_kind,
    strategy_section,
    study_settings,
)


def spec_of(**keys: Any) -> Spec:
    spec, mistakes = read_all(Section(Spec), {"name": "cnn", "command": "python x.py", **keys})
    assert not mistakes
    return spec


def settings(request: StudyRequest, **keys: Any) -> list[dict[str, Any]]:
    spec = spec_of(**keys)
    return [dict(each) for each in study_settings(spec, write_spec(spec), request)]


FOUR = {"resources": {"nodes": 2, "procs_per_node": 2}, "params": {"batch_size": 64}}


def test_all_sizes_are_combined_with_all_strategies() -> None:
    chosen = settings(StudyRequest(nodes=(1, 2), procs=(4,), strategies=("ddp", "zero2")), **FOUR)
    assert chosen == [
        {"strategy": strategy, "resources.nodes": nodes, "resources.procs_per_node": 4}
        for strategy in ({"name": "ddp"}, {"name": "fsdp", "reshard_after_forward": False})
        for nodes in (1, 2)
    ]


def test_processes_take_their_gpus_along() -> None:
    gpus = {"resources": {"gpus_per_node": 8}}
    chosen = settings(StudyRequest(procs=(1, 4)), **gpus)
    assert [each["resources.gpus_per_node"] for each in chosen] == [1, 4]
    # Two processes for each GPU.
    shared = {"resources": {"gpus_per_node": 4, "procs_per_node": 8}}
    assert [each["resources.gpus_per_node"] for each in settings(StudyRequest(procs=(2, 8)), **shared)] == [1, 4]
    with pytest.raises(UserError, match="--procs 3: the spec has 4 GPUs for 8 processes per node"):
        settings(StudyRequest(procs=(2, 3)), **shared)


def test_dp_is_one_process_with_all_gpus_of_a_node() -> None:
    chosen = settings(StudyRequest(procs=(1, 4), strategies=("dp",)), resources={"gpus_per_node": 4})
    assert [(each["resources.procs_per_node"], each["resources.gpus_per_node"]) for each in chosen] == [(1, 1), (1, 4)]
    # Without GPUs all of its sizes are the same.
    chosen = settings(StudyRequest(procs=(1, 4), strategies=("ddp", "dp")))
    assert [each["strategy"]["name"] for each in chosen] == ["ddp", "ddp", "dp"]
    with pytest.raises(UserError, match="dp is a single process on one node"):
        settings(StudyRequest(nodes=(1, 2), strategies=("dp",)))


@pytest.mark.parametrize(
    ("mode", "counts", "batches"),
    [
        ("strong", None, [None, None]),
        ("weak", None, [32, 128]),
        ("strong", "process", [128, 32]),
        ("weak", "process", [None, None]),
    ],
)
def test_the_batch_of_all_processes_stays_or_the_one_of_each(
    mode: str, counts: str | None, batches: list[int | None]
) -> None:
    chosen = settings(StudyRequest(nodes=(1, 4), batch=mode, batch_of=counts), **FOUR)
    assert [each.get("params.batch_size") for each in chosen] == batches


def test_a_batch_that_processes_cannot_divide_is_refused_with_another() -> None:
    with pytest.raises(UserError, match=r"=64 on 4 processes .* on 6 \(strong scaling\): .*=60"):
        settings(StudyRequest(nodes=(1, 3), batch_of="process"), **FOUR)


@pytest.mark.parametrize(
    ("params", "key"),
    [
        ({"batch_size": 64, "eval_batch_size": 8, "lr": 0.1}, BatchKey("params.batch_size")),
        ({"batch_size": 64, "global_batch_size": 8}, BatchKey("params.batch_size")),
        ({"per_device_train_batch_size": 8}, BatchKey("params.per_device_train_batch_size", "process")),
        ({"micro_batch_size": 8}, BatchKey("params.micro_batch_size", "process")),
        ({"bs": 8}, BatchKey("params.bs")),
        ({"global_batch": 8}, BatchKey("params.global_batch")),
        ({"batches": 8, "num_batch": 3, "batch_size": "auto", "test_batch": 1}, None),
    ],
)
def test_the_batch_is_known_by_its_name(params: dict[str, Any], key: BatchKey | None) -> None:
    assert find_batch(params) == key


def test_a_key_of_the_batch_that_is_none_is_a_sentence() -> None:
    with pytest.raises(UserError, match=r"params.train_batch_size and params.local_batch may each be the batch size"):
        find_batch({"train_batch_size": 8, "local_batch": 4})
    with pytest.raises(UserError, match="--batch weak needs the key of the batch size"):
        settings(StudyRequest(nodes=(1, 2), batch="weak"))
    with pytest.raises(UserError, match=r"no key 'params.batch'; did you mean 'params.batch_size'"):
        settings(StudyRequest(nodes=(1, 2), batch_key="params.batch"), **FOUR)
    with pytest.raises(UserError, match="name is 'cnn', which is not a number of samples"):
        settings(StudyRequest(nodes=(1, 2), batch_key="name"), **FOUR)
    # Without a key, nothing is known of the batch, and it stays as it is.
    assert settings(StudyRequest(nodes=(1, 2))) == [{"resources.nodes": 1}, {"resources.nodes": 2}]


@pytest.mark.parametrize("request_", [StudyRequest(), StudyRequest(nodes=(2,)), StudyRequest(strategies=("ddp",))])
def test_a_study_needs_two_points(request_: StudyRequest) -> None:
    with pytest.raises(UserError, match="a study needs two points at least"):
        settings(request_)


def test_strategies_are_words_with_a_precision_and_keep_what_also_suits_them() -> None:
    base = StrategySpec(name="ddp", mixed_precision="bf16", bucket_cap_mb=10.0)
    assert strategy_section("fsdp", base) == {"name": "fsdp", "mixed_precision": "bf16"}
    assert strategy_section("ddp", base) == {"name": "ddp", "mixed_precision": "bf16", "bucket_cap_mb": 10.0}
    assert strategy_section("ddp+fp32", base)["mixed_precision"] is None
    assert strategy_section("zero3+fp16", None) == {
        "name": "fsdp",
        "reshard_after_forward": True,
        "mixed_precision": "fp16",
    }
    assert strategy_section("dp", base) == {"name": "dp"}
    for word, sentence in (
        ("fdsp", "did you mean 'fsdp'"),
        ("lora", "there are ddp, fsdp"),
        ("ddp+int8", "bf16, fp16"),
    ):
        with pytest.raises(UserError, match=sentence):
            strategy_section(word, None)


@pytest.mark.parametrize(
    ("strategy", "word"),
    [
        (None, "ddp"),
        (StrategySpec(name="fsdp", reshard_after_forward=False), "zero2"),
        (StrategySpec(mixed_precision="bf16"), "ddp+bf16"),
        (StrategySpec(hook="topk", density=0.1), "ddp (hook=topk, density=0.1)"),
    ],
)
def test_a_strategy_is_described_as_it_is_asked_for(strategy: StrategySpec | None, word: str) -> None:
    assert describe_strategy(strategy) == word


def test_hardware_is_compared_alone_alike_mixed_and_by_speed() -> None:
    components = [
        {"nodes": 2, "gpus_per_node": 4, "gpu_type": "a100", "slurm": {"partition": "fast"}},
        {"nodes": 1, "gpus_per_node": 8, "slurm": {"partition": "slow"}},
    ]
    resources = {"mixed": True, "mem": "4GB", "components": components}
    alone, alike, mixed, by_speed = settings(StudyRequest(hardware=True), resources=resources)
    for each in (alone, alike):
        assert (each["resources.components"], each["resources.mixed"], each["slurm.partition"]) == (None, False, "fast")
        assert (each["resources.gpu_type"], each["resources.mem"]) == ("a100", "4096M")
    sizes = ("resources.nodes", "resources.procs_per_node", "resources.gpus_per_node")
    assert [[each[size] for size in sizes] for each in (alone, alike)] == [[1, 1, 1], [3, 4, 4]]
    assert mixed == {"resources.mixed": False, "preflight.hardware": "warn"}
    assert by_speed == {"resources.mixed": True}
    kinds = [hardware_kind(spec_of(resources=each).resources) for each in ({}, {"components": components}, resources)]
    assert kinds == [ONE_KIND, MIXED, BY_SPEED]
    with pytest.raises(UserError, match="the spec has none"):
        settings(StudyRequest(hardware=True))
    with pytest.raises(UserError, match="leave --nodes, --procs and --strategies out"):
        settings(StudyRequest(hardware=True, nodes=(1, 2)), resources=resources)
    with pytest.raises(UserError, match="whose nodes differ: --hardware compares them"):
        settings(StudyRequest(nodes=(1, 2)), resources=resources)
