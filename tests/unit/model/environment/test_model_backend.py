"""By which backend ranks with unequal hardware communicate."""

from __future__ import annotations

import pytest

from slurmtrain.model.environment.backend import RankHardware, elect_backend


def rank(
    host: str, name: str = "NVIDIA A100-SXM4-80GB", library: str = "NCCL", version: str = "2.27.5"
) -> RankHardware:
    return RankHardware(host=host, name=name, has_gpu=name != "CPU", library=library, version=version)


V100, NO_GPU = "Tesla V100-SXM2-16GB", ("CPU", "", "")


@pytest.mark.parametrize(
    ("ranks", "backend", "why"),
    [
        ([rank("n1"), rank("n2", V100)], "nccl", "all processes have NCCL 2.27.5"),
        (
            [rank("n1"), rank("n1"), rank("n2", V100, version="2.21.5")],
            "gloo",
            "there is NCCL 2.27.5 on n1; NCCL 2.21.5 on n2",
        ),
        # AMD's library has the same version numbers.
        (
            [rank("n1"), rank("n2", "AMD Instinct MI250X", "RCCL")],
            "gloo",
            "there is NCCL 2.27.5 on n1; RCCL 2.27.5 on n2",
        ),
        ([rank("n1"), rank("n2", V100, "", "")], "gloo", "there is NCCL 2.27.5 on n1; no NCCL on n2"),
        ([rank("n1", V100, "", "")], "gloo", "torch is built without NCCL"),
        ([rank("n1"), rank("n2", *NO_GPU), rank("n2", *NO_GPU)], "gloo", "processes have no GPU on n2"),
        (
            [rank("n0"), *(rank(f"n{number}", *NO_GPU) for number in range(1, 8))],
            "gloo",
            "processes have no GPU on n1, n2, n3, n4 and 3 more",
        ),
        ([rank("n1", *NO_GPU), rank("n2", *NO_GPU)], "gloo", "no process has a GPU"),
    ],
)
def test_nccl_needs_the_same_library_on_all_ranks(ranks: list[RankHardware], backend: str, why: str) -> None:
    elected = elect_backend(ranks)
    assert (elected.name, elected.why) == (backend, why)
