"""What a training process knows about where it runs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.model.experiment.launcher import RANKS
from slurmtrain.model.run.layout import AttemptDir, SubmissionDir
from slurmtrain.runtime.environment import variables


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """The facts that a training process knows about its place. ``attempt`` is None outside a job.

    ``node``: the number of its node; a run's nodes may leave out some numbers; under plain torchrun, torchrun's.
    ``launched``: a launcher has set its rank. ``launcher``: who starts the ranks, as in the spec. ``meets_at``: the
    address and the port of rank 0's store where ranks meet; None if the launcher has arranged that.
    ``launcher_restarts``: how often the command's own launcher has restarted its ranks. ``expected``: the number of
    ranks if such a launcher starts them all; ``first_rank``: the first one on this node. ``resume_from``: the path of
    the checkpoint that the attempt continues from; None if there is none. ``heartbeat``: the path of the board where
    its agent reads its progress; None if there is none. ``stop_signal``: the signal that its agent sends to stop it.
    ``forced_exit_s``: time after that signal until it must have exited, in seconds; None outside a job. ``seed``,
    ``deterministic`` and ``accumulation``: as in the spec.
    """

    rank: int
    local_rank: int
    world_size: int
    node: int
    launched: bool
    launcher: str
    meets_at: tuple[str, int] | None
    launcher_restarts: int
    expected: int
    first_rank: int
    attempt: AttemptDir | None
    submission: SubmissionDir | None
    number: int
    params: Mapping[str, Any]
    from_start: bool
    resume_from: str | None
    heartbeat: str | None
    stop_signal: signal.Signals
    forced_exit_s: float | None
    seed: int | None
    deterministic: bool
    accumulation: int


def this_worker() -> Worker:
    """Read the worker's environment; outside any job, and under plain torchrun, most of it is missing."""
    environ = os.environ
    attempt_dir, launcher = environ.get(variables.ATTEMPT_DIR), environ.get(variables.LAUNCHER, RANKS)
    attempt = AttemptDir(Path(attempt_dir), int(environ.get(variables.ROUND, "0"))) if attempt_dir else None
    restarts = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return Worker(
        rank=int(environ.get("RANK", "0")),
        local_rank=int(environ.get("LOCAL_RANK", "0")),
        world_size=int(environ.get("WORLD_SIZE", "1")),
        node=int(environ.get(variables.NODE, environ.get("GROUP_RANK", "0"))),
        launched="RANK" in environ,
        launcher=launcher,
        meets_at=_meets_at(environ),
        # With ``ranks``, the agent counts the rounds there, as torchrun does.
        launcher_restarts=restarts if launcher != RANKS else 0,
        expected=int(environ.get("SLURMTRAIN_WORLD_SIZE", "1")),
        first_rank=int(environ.get("SLURMTRAIN_FIRST_RANK", "0")),
        attempt=attempt,
        submission=attempt.run.submission(int(environ[variables.SUBMISSION])) if attempt else None,
        number=int(environ.get(variables.ATTEMPT, "1")),
        params=_read_params(environ),
        from_start=bool(environ.get(variables.FROM_START)),
        resume_from=environ.get(variables.RESUME_FROM) or None,
        heartbeat=environ.get(variables.HEARTBEAT),
        stop_signal=signal.Signals[environ.get(variables.STOP_SIGNAL, "SIGTERM")],
        forced_exit_s=float(environ[variables.FORCED_EXIT]) if environ.get(variables.FORCED_EXIT) else None,
        seed=int(environ[variables.SEED]) if environ.get(variables.SEED) else None,
        deterministic=environ.get(variables.DETERMINISTIC) == "1",
        accumulation=int(environ.get(variables.ACCUMULATION, "1")),
    )


def _meets_at(environ: Mapping[str, str]) -> tuple[str, int] | None:
    address, port = environ.get("SLURMTRAIN_MASTER_ADDR"), environ.get("SLURMTRAIN_MASTER_PORT")
    # A launcher within a rank has a port of its own, and one that the agent starts serves the store itself.
    is_agents = port is not None and environ.get("MASTER_PORT") == port and "TORCHELASTIC_RUN_ID" in environ
    serves = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return (address, int(port)) if address and port and is_agents and not serves else None


def _read_params(environ: Mapping[str, str]) -> Any:
    """The run's parameters, from a variable or, if they are too long for one, from the file that another names."""
    path = environ.get(variables.PARAMS_FILE)
    return json.loads(Path(path).read_bytes() if path else environ.get(variables.PARAMS, "{}"))
