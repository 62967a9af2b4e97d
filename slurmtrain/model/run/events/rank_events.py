"""Events that ranks write, and the process that reads a script's metrics.

They are in ``attempts/*/rank-<r>.jsonl`` and ``script.jsonl``, after restarts in place ``rank-<r>.<round>.jsonl`` and
``script.<round>.jsonl``. Events about checkpoints are in :mod:`.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from slurmtrain.model.run.events.base import OMIT_NONE, Payload, payload


@payload("session")
class SessionStarted(Payload):
    """The training script started its session, or reported its progress for the first time."""

    # accounting.py takes 0 for unknown, since a session begins there and restores its checkpoint afterwards.
    step: int = 0
    """Finished steps: 0 before a session has restored a checkpoint."""
    world_size: int = 0
    """The number of ranks."""
    device: str = ""
    """The rank's device, as torch names it."""


@payload("registered")
class StateRegistered(Payload):
    """The script registered the objects that checkpoints contain."""

    objects: Sequence[str] = ()
    """Their names in the script."""


@payload("total")
class TrainingStarted(Payload):
    """The loop over steps started."""

    total_steps: int | None = None
    """The number of steps in the whole run."""


@payload("shares")
class SharesChosen(Payload):
    """The ranks divide batches by their speeds from now on, or found that they already do."""

    step: int | None = None
    """Finished steps."""
    shares: Sequence[int] = ()
    """The samples of a batch that each rank gets, by rank."""
    limits: Sequence[int] = ()
    """How many of them fit into the memory of each rank at once, 0 where that is unknown; more are divided into
    microbatches."""
    fixed_s: Sequence[float] = ()
    """Seconds that each rank takes for a step without samples."""
    sample_s: Sequence[float] = ()
    """Seconds that each rank takes for a sample."""
    step_s: float | None = None
    """Seconds that the slowest rank computes in a step with these shares, by these speeds."""
    before_s: float | None = None
    """The same with the shares before."""


@payload("hardware")
class HardwareCompared(Payload):
    """The ranks have told each other their hardware, because it decides how they compute."""

    names: Sequence[str] = ()
    """The name of each rank's GPU, or ``CPU``, by rank."""
    precisions: Sequence[str] = ()
    """The precision of forward and backward passes, by rank; empty if the spec has one for all."""
    backend: str = ""
    """Which of torch's backends reduces gradients, if the ranks have elected it: ``nccl`` or ``gloo``."""
    backend_why: str = ""
    """Why, as a phrase."""


@payload("stopped")
class RankStopped(Payload):
    """The rank exits because a stop was requested."""

    step: int | None = None
    """Finished steps."""


# Trainers also exit with 0 when they are told to stop: only this tells the two apart (exit_report.has_completed).
@payload("finished")
class TrainingCompleted(Payload):
    """The rank's work is done: if it exits with code 0 after this, it has completed, even if a stop was requested."""

    step: int | None = None
    """Finished steps; None if unknown."""


# The registry does not keep it: ops/shared/run_measures.py reads it from the journals of ranks.
@payload("measured")
class RankMeasured(Payload):
    """How fast the rank has been since its start, and its memory. Only the last such event counts.

    It is recorded less and less often while the rank trains, and when its work is done or it stops.
    """

    steps: int | None = field(default=None, metadata=OMIT_NONE)
    """How many steps it has finished since then; None: unknown."""
    samples: int | None = field(default=None, metadata=OMIT_NONE)
    """The samples of the batches of these steps, of all ranks together; None: the script divides batches itself."""
    epoch_samples: int | None = field(default=None, metadata=OMIT_NONE)
    """The samples of an epoch of the only ``run.loader`` that steps have gone through; None: there is none."""
    peak_bytes: int | None = None
    """The most memory that it has used at once; None: unknown."""
    memory: str = ""
    """Which memory that is. ``gpu``: what torch had allocated on one GPU. ``process``: what was resident of it."""
    step_p50_s: float | None = field(default=None, metadata=OMIT_NONE)
    """Seconds of the median step, excluding saves, pauses and the first step."""
    step_p95_s: float | None = field(default=None, metadata=OMIT_NONE)
    """The 95th percentile of the seconds of these steps."""
    own_p50_s: float | None = field(default=None, metadata=OMIT_NONE)
    """Seconds until the end of the forward pass, when the rank does not wait for others: the median of some steps."""
    data_wait_share: float | None = field(default=None, metadata=OMIT_NONE)
    """The share of step time, from 0 to 1, that the rank waited for data."""
    communication_share: float | None = field(default=None, metadata=OMIT_NONE)
    """The share of step time in a few steps, from 0 to 1, that the rank communicated or waited for other ranks, without
    computing."""
    profiled_steps: int | None = field(default=None, metadata=OMIT_NONE)
    """How many steps a profiler has recorded; their speed does not count."""
    profiled_s: float | None = field(default=None, metadata=OMIT_NONE)
    """Seconds of these steps, including the start and end of the profiler."""
    tokens_per_sample: float | None = field(default=None, metadata=OMIT_NONE)
    """Tokens of a sample, as stated by the script."""
    flops_per_sample: float | None = field(default=None, metadata=OMIT_NONE)
    """Floating-point operations of the model for a sample in a step, as stated by the script."""
    peak_flops: float | None = field(default=None, metadata=OMIT_NONE)
    """The peak FLOP/s of the rank's device in the model's precision."""


@payload("traced")
class StepsTraced(Payload):
    """The rank has written a trace of some steps, by torch's profiler."""

    rank: int | None = None
    """The rank."""
    first: int | None = None
    """How many steps had finished when the trace began."""
    last: int | None = None
    """How many steps had finished when the trace ended."""
    path: str | None = None
    """The file, relative to the run's directory; None: it could not be written."""
    bytes: int | None = None
    """The size of the file."""
    why: str = ""
    """Which rank is the slowest, or why that is not known."""
    problem: str = ""
    """Why there is no trace; empty if there is one."""


@payload("raised")
class ExceptionRaised(Payload):
    """The script raised an exception."""

    type: str = ""
    """The name of its class."""
    message: str = ""
    """Its message, with secrets removed."""


@payload("script_steps")
class ScriptProgressed(Payload):
    """The progress of the script according to its output: the first step of a round, and the last one."""

    step: int | None = field(default=None, metadata=OMIT_NONE)
    """The step before the first one that was read, which the ranks have resumed from, as far as is known."""
    # Missing if the reader was killed; the last line of its metrics file then still has the step.
    last_step: int | None = field(default=None, metadata=OMIT_NONE)
    """The last step that was read, when the ranks have ended."""
    total_steps: int | None = None
    """The number of steps in the whole run, if the output or the spec says."""


# The registry makes no steps of an attempt of it: nobody has said what the lines of the output mean.
@payload("script_guess")
class OutputUnderstood(Payload):
    """Metrics are guessed from the output of a script that reports none."""

    counted: bool = False
    """Whether steps are the number of lines with metrics, because no line names a step."""
    total_steps: int | None = None
    """The number of steps in the whole run, if the output says."""


@payload("script_unread")
class ScriptUnread(Payload):
    """Metrics are no longer read from the script's output."""

    why: str = ""
    """Why, as a sentence without a full stop."""
