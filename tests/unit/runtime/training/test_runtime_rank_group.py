"""Before they join, ranks with unequal hardware tell each other what they have."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import distributed as dist

from slurmtrain.model.environment import ElectedBackend, RankHardware
from slurmtrain.model.run.events.rank_events import HardwareCompared
from slurmtrain.runtime.training.session import describe_rank, exchange, with_backend


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


def test_the_journal_gets_what_was_compared_for_precisions_and_the_backend() -> None:
    compared = HardwareCompared(names=("CPU", "Tesla T4"), precisions=("bf16", "fp16"))
    elected = ElectedBackend("gloo", "processes have no GPU on n1")
    assert with_backend(None, None) is None
    assert with_backend(compared, None) == compared
    both = HardwareCompared(
        names=compared.names, precisions=compared.precisions, backend="gloo", backend_why="processes have no GPU on n1"
    )
    assert with_backend(compared, elected) == both
