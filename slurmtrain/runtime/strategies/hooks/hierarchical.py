"""Gradients are reduced by layers: first within each node, then across nodes, each process a part of them.

The three collectives of a bucket follow each other, and the collectives of all buckets have the same order on all
ranks, as they must. With NCCL a stream of the GPU keeps it. Collectives of gloo are waited for by the thread that calls
them, so there a thread of its own calls them, and the backward pass goes on meanwhile. Callbacks would not do: gloo
runs the callbacks of several buckets in any order.
"""

from __future__ import annotations

import contextlib
from queue import SimpleQueue
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.nn.functional import pad

from slurmtrain.runtime.strategies.hooks.backend import has_nccl
from slurmtrain.runtime.strategies.mesh import REPLICATE, SHARD


class Hierarchical:
    """The state of the communication hook :func:`reduce_by_layers`."""

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        """For the ranks of a ``mesh`` of nodes and their ranks; this one computes on ``device``."""
        self._ranks = mesh.size()
        self._within = mesh[SHARD].get_group()
        self._across = mesh[REPLICATE].get_group()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._buckets: SimpleQueue[tuple[Tensor, Future[Tensor]]] | None = None
        # A daemon, so that a rank that fails ends although the others do not answer any more.
        if not has_nccl(device):
            self._buckets = SimpleQueue()
            Thread(target=self._reduce_all, args=(self._buckets,), name="slurmtrain-reduce", daemon=True).start()

    def reduce(self, bucket: Tensor) -> Future[Tensor]:
        """The future mean over ranks of the gradients in a ``bucket``, which changes."""
        future: Future[Tensor] = Future(devices=None if self._stream is None else [bucket.device])
        # First, as torch does without a hook, so that sums of float16 do not overflow.
        bucket.div_(self._ranks)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(bucket.device))
        if self._buckets is None:
            self._settle(bucket, future)
        else:
            self._buckets.put((bucket, future))
        return future

    def _reduce_all(self, buckets: SimpleQueue[tuple[Tensor, Future[Tensor]]]) -> None:
        while True:
            self._settle(*buckets.get())

    def _settle(self, bucket: Tensor, future: Future[Tensor]) -> None:
        """Give the ``future`` of a ``bucket`` its value, or what went wrong."""
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            try:
                total = self._sum(bucket) if self._buckets is None else self._sum(bucket.cpu()).to(bucket.device)
            except Exception as error:  # noqa: BLE001 (any error: the backward pass waits for it)
                future.set_exception(error)  # type: ignore[arg-type]
            else:
                future.set_result(total)

    def _sum(self, bucket: Tensor) -> Tensor:
        """The sum of a ``bucket`` over all ranks."""
        per_node = self._within.size()
        # Collectives take parts of the same size.
        whole = pad(bucket, (0, -len(bucket) % per_node)) if len(bucket) % per_node else bucket
        part = whole.new_empty(len(whole) // per_node)
        dist.reduce_scatter_tensor(part, whole, group=self._within)
        dist.all_reduce(part, group=self._across)
        dist.all_gather_into_tensor(whole, part, group=self._within)
        return whole[: len(bucket)]


# DistributedDataParallel refuses annotations that are texts, as in this module.
def reduce_by_layers(state, bucket):  # type: ignore[no-untyped-def]
    """The communication hook: reduce a ``bucket`` of gradients, with a ``state`` of :class:`Hierarchical`."""
    return state.reduce(bucket.buffer())
