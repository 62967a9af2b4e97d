"""What a run adds to sums over all runs: attempts, interruptions, time on nodes and GPUs, work that was lost.

Only what never shrinks is counted, since sums become Prometheus' counters, which take a smaller number for a restart:
time that counts as training may later turn out to be lost (``docs/goodput.md``), so training time is not among it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from slurmtrain.model.run.accounting import mean_nodes
from slurmtrain.model.run.events.command_events import Submitting
from slurmtrain.model.run.run import CAUSES, GROW, Attempt, Run

ATTEMPTS, QUEUED, QUEUE_S, LOST_STEPS = "attempts", "queued", "queue_s", "lost_steps"
NODE_S, GPU_S = "node_s", "gpu_s"
INTERRUPTED = "interrupted:"
"""Begins the name of a count of interruptions, whose end is the cause."""
UNPRODUCTIVE = ("start", "preflight", "restore", "stall", "stop", "lost")
"""Kinds of time on nodes that is neither queueing nor training that was kept."""
PLANNED = ("completed", "cancelled")
"""Causes for which attempts end as somebody meant them to; every other is an interruption."""


class Placement(NamedTuple):
    """Where attempts ran: ``executor`` is slurm or local, or empty; ``partition`` is empty where there is none."""

    executor: str
    partition: str


Tally = dict[Placement, dict[str, float]]
"""Sums by place, then by name: seconds where the name says so, else counts."""


def place_of(run: Run, attempt: Attempt | None, submissions: Mapping[int, Submitting]) -> Placement:
    """Where an ``attempt`` of a ``run`` ran. ``submissions``: the run's, by number."""
    if attempt is None:
        return Placement(run.executor, "")
    submitting = submissions.get(attempt.submission)
    return Placement(attempt.executor or run.executor, (submitting and submitting.partition) or "")


def tally(run: Run, submissions: Mapping[int, Submitting], resources: Mapping[str, Any]) -> Tally:
    """What a run adds to the sums.

    Args:
        run: The run.
        submissions: Its submissions, by number: a ``resume`` may have changed what an attempt is given.
        resources: The ``resources`` of its spec when it was created.
    """
    gpus_per_node = mean_gpus(resources)
    result: Tally = {}
    for attempt in run.attempts:
        submitting = submissions.get(attempt.submission)
        if submitting is not None and submitting.resources is not None:
            gpus_per_node = mean_gpus(submitting.resources)
        sums = result.setdefault(place_of(run, attempt, submissions), defaultdict(float))
        _add(sums, attempt, gpus_per_node)
    return {place: {name: total for name, total in sums.items() if total} for place, sums in result.items()}


def mean_gpus(resources: Mapping[str, Any]) -> float:
    """GPUs of a node by the spec's ``resources``; with components, whose nodes all take part, the mean over them."""
    gpus = resources.get("gpus_per_node")
    of_all = gpus if isinstance(gpus, int) else 0
    components = [each for each in resources.get("components") or () if isinstance(each.get("gpus_per_node"), int)]
    if not components:
        return of_all
    total = sum(each["nodes"] * each["gpus_per_node"] for each in components)
    return float(total / sum(each["nodes"] for each in components))


def _add(sums: dict[str, float], attempt: Attempt, gpus_per_node: float) -> None:
    sums[ATTEMPTS] += 1
    sums[LOST_STEPS] += attempt.lost_steps or 0
    if attempt.started_at is not None:
        sums[QUEUED] += 1
        sums[QUEUE_S] += attempt.spent.get("queue", 0.0)
    causes = [str(restart.get("cause")) for restart in attempt.restarts if restart.get("cause") != GROW]
    if attempt.ended and attempt.cause is not None and attempt.cause not in PLANNED:
        causes.append(attempt.cause)
    for cause in causes:
        # A label's values must be few, whatever a journal holds.
        sums[INTERRUPTED + (cause if cause in CAUSES else "other")] += 1
    nodes = mean_nodes(attempt)
    seconds = {kind: nodes * spent for kind, spent in attempt.spent.items() if kind != "queue"}
    # The runs of a pack share a node, and perhaps its GPUs: what each takes adds up to no more than the job's.
    for name, weight in (
        (NODE_S, 1 / attempt.pack),
        (GPU_S, gpus_per_node / (attempt.pack if attempt.share_gpu else 1)),
    ):
        if weight and any(seconds.values()):
            sums[name] += weight * sum(seconds.values())
            for kind in UNPRODUCTIVE:
                sums[f"{name}:{kind}"] += weight * seconds.get(kind, 0.0)


def merged(old: Tally, new: Tally) -> Tally:
    """The larger of both for each sum: of an ``old`` and a ``new`` tally of one run."""
    return {
        place: {
            name: max(old.get(place, {}).get(name, 0.0), new.get(place, {}).get(name, 0.0))
            for name in {**old.get(place, {}), **new.get(place, {})}
        }
        for place in {**old, **new}
    }
