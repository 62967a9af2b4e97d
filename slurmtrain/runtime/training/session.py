"""The library inside a training script: ``with slurmtrain.session() as run``."""

from __future__ import annotations

import atexit
import gc
import json
import logging
import socket
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from slurmtrain.errors import LaunchError
from slurmtrain.model.diagnosis.hang import Phase
from slurmtrain.model.environment import GLOO, NCCL, ElectedBackend, RankHardware, elect_backend
from slurmtrain.model.interruption.exit_report import STOPPED
from slurmtrain.model.interruption.interval import InterruptionStats
from slurmtrain.model.run.events.rank_events import (
    ExceptionRaised,
    HardwareCompared,
    SessionStarted,
    StateRegistered,
    TrainingCompleted,
)
from slurmtrain.model.urls import redact
from slurmtrain.runtime.checkpoint import checkpoint_files
from slurmtrain.runtime.checkpoint.rng import make_repeatable
from slurmtrain.runtime.environment.node import Worker, read_plan
from slurmtrain.runtime.environment.variables import use_loopback
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.job.run_reader import read_interruptions
from slurmtrain.runtime.job.torch_private import check_version, import_checkpoints
from slurmtrain.runtime.training.loader import Loaders
from slurmtrain.runtime.training.loop import this_ranked_worker
from slurmtrain.runtime.training.parallel import Shares
from slurmtrain.runtime.training.passes import hardware_of
from slurmtrain.runtime.training.profiling import CommunicationSampler, StepTracer
from slurmtrain.runtime.training.steps import SteppedTraining
from slurmtrain.runtime.training.strategy_interface import Strategy
from slurmtrain.system.interpreter import STRATEGIES, load_plugin, without_collection
from slurmtrain.system.journal import Journal

_log = logging.getLogger("slurmtrain")


def pick_device(local_rank: int) -> torch.device:
    """The device of a rank, which becomes torch's current one: a GPU if there is any, else the CPU.

    Args:
        local_rank: The rank on its node, from 0.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def join_group(
    worker: Worker, device: torch.device, backend: str | None, timeout: timedelta | None, *, elects: bool = False
) -> tuple[bool, ElectedBackend | None]:
    """Join the process group of the run, unless this process is in one.

    Args:
        worker: Where this process runs.
        device: Where it computes.
        backend: torch's name of one; None: gloo, and NCCL for GPUs.
        timeout: How long a collective may take; None: torch's default.
        elects: Whether processes may have unequal hardware, and so find out first whether all of them can use NCCL.

    Returns:
        Whether it has joined the group here, and what was elected, if anything.

    Raises:
        LaunchError: This is rank 0, and it cannot listen for the others.
    """
    if dist.is_initialized():
        return False, None
    store: dist.Store
    if not worker.launched:
        # Alone it needs no network, and gloo would look up the name of this machine.
        use_loopback()
        store, rank, world_size = dist.HashStore(), 0, 1
    elif worker.meets_at is None:
        # Under a launcher it is what init_process_group takes if it gets no store.
        store, rank, world_size = next(rendezvous("env://"))
    else:
        # Rank 0 listens on the address of the elected network only: a store believes whoever connects.
        rank, world_size, is_first = worker.rank, worker.world_size, worker.rank == 0
        listener = _listen(worker.meets_at, world_size) if is_first else None
        patience = timeout or default_pg_timeout
        store = dist.TCPStore(
            *worker.meets_at, None, is_first, patience, wait_for_workers=False, master_listen_fd=listener
        )
    elected = None
    if backend is None and elects and world_size > 1:
        own = RankHardware(host=socket.gethostname(), **describe_rank(device))
        # Under keys of its own, since the process group then uses the same store.
        ranks = exchange(dist.PrefixStore("slurmtrain/hardware", store), rank, world_size, own)
        elected = elect_backend(ranks)
        if rank == 0 and elected.name == GLOO and any(each.has_gpu for each in ranks):
            _log.warning("gloo reduces gradients, which is slower than NCCL: %s", elected.why)
    if backend is None:
        uses_nccl = device.type == "cuda" and (elected is None or elected.name == NCCL)
        backend = "cpu:gloo,cuda:nccl" if uses_nccl else GLOO
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return True, elected


def _listen(address: tuple[str, int], world_size: int) -> int:
    """A socket at which the other ranks find rank 0. Raises LaunchError.

    The agent has reserved the port, so that only sockets which may share it can be bound to it.
    """
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        # Detached, since Python would close it with the object while the store still listens.
        return socket.create_server(address, family=family, backlog=world_size).detach()
    except OSError as error:
        place = f"port {address[1]} of {address[0]}"
        raise LaunchError(f"rank 0 cannot listen for the other ranks at {place}: {error.strerror}") from error


def exchange(store: dist.Store, rank: int, world_size: int, own: RankHardware) -> list[RankHardware]:
    """The hardware of all ranks, by rank; each calls it with its ``own``.

    Args:
        store: Where all of them leave it, and nothing else is.
        rank: This one.
        world_size: How many there are.
        own: This one's.
    """
    keys = [str(number) for number in range(world_size)]
    store.set(str(rank), json.dumps(asdict(own)))
    store.wait(keys)
    return [RankHardware(**json.loads(text)) for text in store.multi_get(keys)]


def describe_rank(device: torch.device) -> dict[str, Any]:
    """What :class:`RankHardware` holds of a rank that computes on a ``device``, but for its host."""
    facts: dict[str, Any] = {"name": hardware_of(device)[0], "has_gpu": device.type == "cuda"}
    if device.type == "cuda" and dist.is_nccl_available():
        # AMD's library has the same interface, and versions of its own that look alike.
        facts["library"] = "NCCL" if torch.version.hip is None else "RCCL"
        facts["version"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return facts


def with_backend(compared: HardwareCompared | None, elected: ElectedBackend | None) -> HardwareCompared | None:
    """What to journal: what was ``compared`` for precisions, with the backend that was ``elected``; None if nothing."""
    if elected is None:
        return compared
    return replace(compared or HardwareCompared(), backend=elected.name, backend_why=elected.why)


# An exception's message is cut to this length: some contain a whole tensor.
_MESSAGE_CHARACTERS = 2000


def session(
    params: Mapping[str, Any] | None = None, *, backend: str | None = None, timeout: timedelta | None = None
) -> Session:
    """Join the run that this process belongs to.

    Use it as a context manager, once in a process, in the main thread::

        with slurmtrain.session(params={"lr": 0.1, "steps": 1000}) as run:
            model = Net().to(run.device)
            optimizer = torch.optim.SGD(model.parameters(), lr=run.params["lr"])
            run.checkpoint(model=model, optimizer=optimizer)  # restores if there is a checkpoint
            for step in run.steps(run.params["steps"]):
                loss = train_step(model, optimizer, batch(step))
                run.log(loss=loss)

    Entering it joins the process group, unless the script has already created one. On a stop signal (preemption, time
    limit, ``slurmtrain cancel``) all ranks finish the same step, save, and exit with code 75, which means that the run
    can continue from there; leaving the ``with`` block in any other way without an exception means that the work is
    done, unless a stop signal has come and ``run.steps(total)`` has not reached its total. The same script also runs
    outside a job and under plain torchrun, but without checkpoints and a metrics file: those need a run directory.

    Args:
        params: Values for parameters that the spec does not set, by name; they also apply outside any job. The spec's
            ``params`` win.
        backend: As for ``torch.distributed.init_process_group``. By default, with GPUs, NCCL for tensors on GPUs and
            gloo for tensors on CPUs; otherwise gloo, and also with ``resources.mixed`` if not all can use NCCL.
        timeout: As for ``torch.distributed.init_process_group``: how long a collective may take. By default torch's.

    Returns:
        The session: ``rank``, ``world_size``, ``device``, ``params`` and so on are available before it is entered.

    Raises:
        NotAvailable: This version of torch is too old.
        PathError: The run's plan cannot be read. Entering the session raises what
            ``torch.distributed.init_process_group`` raises.
        LaunchError: With ``launcher: node`` or ``none``, it is not known which rank this process is; or the launcher
            has restarted it.
    """
    check_version(torch.__version__)
    return Session(this_ranked_worker(), params or {}, backend, timeout)


class Session(SteppedTraining):
    """A training script's view of its run; :func:`session` makes it.

    All ranks must call :meth:`checkpoint`, :meth:`steps` and :meth:`log` alike, since these run collectives.
    """

    def __init__(
        self, worker: Worker, params: Mapping[str, Any], backend: str | None, timeout: timedelta | None
    ) -> None:
        """``worker``: where this process runs; ``params``, ``backend`` and ``timeout`` as for :func:`session`."""
        self.rank = worker.rank
        """The rank of this process in the run, from 0."""
        self.local_rank = worker.local_rank
        """The rank of this process on its node, from 0."""
        self.world_size = worker.world_size
        """The number of processes in the run."""
        self.attempt = worker.number
        """Which attempt of the run this is, from 1."""
        self.seed = worker.seed
        """The spec's ``seed``, with which random numbers are seeded as the session is entered; None if it has none."""
        self.accumulation = worker.accumulation
        """Into how many microbatches to divide the batch of each rank (gradient accumulation), the spec's or, after it
        ran out of memory, more; 1 outside a job."""
        self.params = {**params, **worker.params}
        """The spec's ``params``, which override params given to :func:`session`."""
        self.dir: Path | None = worker.attempt.run.path if worker.attempt else None
        """The run's directory; None outside a job."""
        self.device = pick_device(worker.local_rank)
        """Where to compute: this process's GPU, or the CPU."""
        super().__init__(worker)
        self._backend = backend
        self._timeout = timeout
        self._plan = read_plan(worker.submission.plan) if worker.submission is not None else None
        self._owns_group = False

    # --- entering and leaving -----------------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        attempt = self._worker.attempt
        if attempt is not None:
            self._begin_process()
        self._beat(Phase.JOINING)
        with without_collection():
            # Outside a job too, where nothing is saved: the first optimizer imports torch's compiler anyway, and once
            # the group is joined that would keep a reference to it, and so threads that can abort the process at its
            # exit.
            import_checkpoints()
        mixed = self._plan is not None and self._plan.spec.resources.mixed
        self._owns_group, elected = join_group(self._worker, self.device, self._backend, self._timeout, elects=mixed)
        make_repeatable(self._worker)
        self._ranks = RankGroup(self.rank, self.world_size, self.device)
        strategy = self._plan.spec.strategy if self._plan else None
        self._strategy = Strategy(strategy, self._ranks, self._worker.node, self.accumulation, mixed=mixed)
        self._shares = Shares(
            self._strategy.dp_rank,
            self._strategy.dp_size,
            self.device,
            step=lambda: self.step if self._in_step else None,
            microbatches=self.accumulation,
            differ=mixed,
        )
        self._loaders = Loaders(self._shares, self.seed)
        if mixed and self.world_size > 1:
            run = attempt.run if attempt is not None else None
            self._balancer = load_plugin(STRATEGIES, "mixed")(self._shares, self._ranks, run)
        if self._plan is not None and self._plan.spec.measures.communication:
            self._communication = CommunicationSampler(self.device, alone=self.world_size == 1)
        if attempt is not None:
            self._hear_signals()
            self._journal = Journal(attempt.rank_journal(self.rank))
            if self.rank == 0:
                self._metrics.open(attempt.metrics)
            profile = self._plan.spec.profile if self._plan else None
            if profile is not None and profile.steps is not None:
                self._tracer = StepTracer(profile.steps, attempt, self._ranks)
            self._write_first(SessionStarted(world_size=self.world_size, device=str(self.device)))
            if (compared := with_backend(self._strategy.hardware, elected)) is not None:
                self._write_first(compared)
        self._beat(Phase.READY)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        left = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        stopped = isinstance(error, SystemExit) and error.code == STOPPED
        try:
            if left:
                self._finish()
                # After a stop signal it may also mean that the script, or a library that it calls, has heard it itself.
                if self._flag.raised is None or 0 < self._total <= self.step:
                    self._write(self._measured())
                    # Every rank: an exit code of 0 does not prove this to the agent once a stop has been requested.
                    self._write(TrainingCompleted(step=self.step))
            elif not isinstance(error, SystemExit | KeyboardInterrupt):
                # Before anything else: the rank with the earliest event counts as the first to fail.
                message = redact(str(error))[:_MESSAGE_CHARACTERS]
                self._write(ExceptionRaised(type=type(error).__name__, message=message))
        finally:
            self._loaders.close()
            if self._checkpointer is not None:
                self._checkpointer.close(failed=not (left or stopped))
            self._close_files()
            self._beat(Phase.LEFT)
        if left or stopped:
            self._ranks.close()
            if self._owns_group and dist.is_initialized():
                dist.destroy_process_group()
                # DistributedDataParallel, a cycle of references, keeps the group, and with it gloo's threads, which can
                # abort an interpreter that shuts down (RankGroup.close).
                atexit.register(gc.collect)
            self._flag.release()

    # --- what scripts call ------------------------------------------------------------------------------------------

    def checkpoint(self, **objects: object) -> None:
        """Register what checkpoints contain, and restore it at once if there is a checkpoint.

        Call it once, on all ranks, with everything::

            run.checkpoint(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)

        DistributedDataParallel and torch.compile wrappers are unwrapped, and modules may be sharded by ``fully_shard``.
        The states of Python's, NumPy's and torch's random number generators are included, and so is the state of the
        communication hook that :meth:`parallelize` has chosen. Outside a job it does nothing.

        Args:
            objects: Anything with ``state_dict`` and ``load_state_dict``, by their names in the checkpoint; of others,
                such as the state of a communication hook, each rank's attributes. Ranks may have different parts of a
                model, if the names of parameters are unique in the whole model.

        Raises:
            CheckpointError: Checkpoints exist and none can be restored, or the newest good one does not fit these
                objects.
            StrategyError: An optimizer was made before :meth:`parallelize`.
            TypeError: One of the objects has no state that can be saved.
            RuntimeError: It was already called.
        """
        if self._checkpointer is not None:
            raise RuntimeError("run.checkpoint() may be called only once, with everything that a checkpoint contains")
        self._strategy.check_optimizers(objects)
        attempt, plan = self._worker.attempt, self._plan
        if attempt is None or plan is None:
            return
        objects.update(self._loaders.register())
        with without_collection():
            from slurmtrain.runtime.checkpoint.checkpointer import Checkpointer
            from slurmtrain.runtime.checkpoint.state_dicts import Objects

        states = self._strategy.states() | ({"run.shares": self._shares} if self._balancer is not None else {})
        self._checkpointer = Checkpointer(
            attempt,
            Objects({**objects, **states}, additions=states),
            plan,
            read_interruptions(self._worker) if self.rank == 0 else InterruptionStats(),
            self._ranks,
            self._journal if self.rank == 0 else None,
        )
        self._write_first(StateRegistered(objects=sorted(objects)))
        if self.rank == 0:
            # Before the restore, which then finds what a killed writer had completed and not yet renamed.
            checkpoint_files.sweep(attempt.run.checkpoints, attempt.owner)
        self._registered = tuple(objects.values())
        from_start = self._worker.from_start
        restored = self._outside_step(lambda checkpointer: checkpointer.restore(from_start=from_start))
        if restored is not None:
            self.step = self._first_step = restored.step
            self._restored_rng = restored.rng
        self._restore_rng()
