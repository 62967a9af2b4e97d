"""Events: immutable facts with a time and a writer, as lines of journals.

A line is one JSON object: ``{"t": seconds since 1970, "kind": ..., ...}``. The kinds, by writer:

commands (journal/<writer>.jsonl)
    created        name, plan_hash, executor, by, git                       the run directory is complete
    submitting     submission, job_id, attempt, executor, host, overrides, from_start, without, partition, by, requeue,
                   nodes, follows    by: submit, resume, sync; requeue: the spec's; follows: the attempt before
    submitted      submission, job_id, process                              the scheduler has it; process: local jobs
    unstarted      submission, reason                                       handing over failed; nothing runs or will
    cancel         by                                                       a person wants it ended
    observed       job_id, restart, source, state, reason, nodes, started_at, ended_at, time_limit_s, exit_code, signal,
                   last_seen, checkpoints    what the scheduler (source squeue, sacct) or the machine (source host) says
                                             (`prune` tells of checkpoints alone, without a job)
    requeue        job_id, restart, exclude, why                    done for an agent that could not (see below)
    replaced       job_id, restart, why               a job that Slurm holds for good is ended, to submit another
    requeue_failed job_id, restart, reason                          nobody will start the run again
    asked          request, by                                              a person wants a checkpoint now
    verified       path, step, reason                                       its files were looked at; null: good
    pruned         path, step, why                                          a checkpoint was deleted
    mlflow         mlflow_run_id, uri                                       the MLflow run that mirrors this run
commands (nodes/<writer>.jsonl of the runs root)
    forgiven       host, by, findings [[run id, name of the attempt's directory], ...]
node agent (attempts/*/node-<i>.jsonl)
    agent          node, nodes, host, process, executor, submission, attempt
    waiting        run                                                      a local sweep goes one run after the other
    election       networks, excluded, elected, tests      node 0: networks it could be, and which one it is
    clock          offset_ms, bound_ms, samples, disciplined, source        this node's clock beside node 0's
    preflight      status, seconds, findings                                what the checks say of this node
    rendezvous     master_addr, master_port, interface
    workers        processes {rank: process}, resume_from
    surplus        why                                          started though the run is over: it does nothing
    stopping       cause, why, signal                                       ranks are asked to stop, or ended
    hang           node, ranks                                              what the ranks of this node are doing
    straggler      rank, host, ratio, own_s, median_s, step                 node 0: a rank that holds the others up
    restart        round, members, cause, why, failures, lost, reached, past    node 0: ranks are started again
    found          path, step, bytes, saved_at                              a checkpoint of a script of the user's own
    requeue        cause, exclude, why, delay_s    node 0: about to put the job back into the queue, without these nodes
    requeue_failed reason                                                   that could not be done
    end            cause, reason, failed_at, cascade, signal, sure, failures, evidence
                   sure: the scheduler was asked what the signal stood for
rank (attempts/*/rank-<r>.jsonl, and rank-<r>.<round>.jsonl where ranks were started again in place)
    session        step, world_size, device
    registered     objects                                                  what a checkpoint consists of
    total          total_steps
    restored       as saved, and world_size, hashed, lost_steps, rederived, took_s    where training goes on from
    rejected       step, path, reason, aside       a damaged checkpoint was passed over; aside: where it has been put
    interval       seconds, optimum_s, stall_s, save_s, mtbf_s, interruptions, bounded_by, why     how often to save
    saved          step, path, bytes, seconds, stall_s, saved_at, why, metrics, attempt, request
    save_failed    step, reason, why, request
    over_quota     bytes, taken, quota                      what is to be saved goes beyond what the spec allows
    pruned         path, step, why
    stopped        step
    raised         type, message
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """One fact. ``source`` is the journal's path relative to the run directory, ``offset`` its byte position there."""

    time: float
    kind: str
    data: Mapping[str, Any]
    source: str
    offset: int

    @property
    def order(self) -> tuple[float, str, int]:
        """Events of one run sort by this: the same on every rebuild."""
        return (self.time, self.source, self.offset)


def encode(time: float, kind: str, data: Mapping[str, Any]) -> bytes:
    """One line of a journal, its newline included. NaN and infinities are written as JSON's null."""
    record = {"t": round(time, 6), "kind": kind, **data}
    try:
        text = json.dumps(record, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(record), separators=(",", ":"))
    return text.encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
