"""What the GPUs of runs use, as Prometheus has it, by the last lines that their nodes have written."""

from __future__ import annotations

from statistics import fmean

from slurmtrain.model.metrics.load import ENERGY, GPU_MEMORY, POWER, UTILIZATION
from slurmtrain.model.run.accounting import Placement, place_of
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.node_load import load_files, newest_load_files, newest_sample
from slurmtrain.ops.shared.views import RunRecord
from slurmtrain.ops.shared.workspace import Workspace

_MEGABYTE = 1e6


def energy_of_run(workspace: Workspace, run: Run) -> dict[Placement, float]:
    """The joules that the GPUs of a run have taken in all of its attempts, by where these were; none are left out.

    Args:
        workspace: Where the run is.
        run: The run.
    """
    directory = workspace.root.run(run.id)
    result: dict[Placement, float] = {}
    for attempt in run.attempts:
        # Nodes count up within an attempt, so that the last line has all of it.
        newest = map(newest_sample, load_files(directory.attempt(attempt.job_id, attempt.restart)))
        joules = sum(sum(sample.of_gpus(ENERGY).values()) for sample in newest if sample is not None)
        if joules:
            place = place_of(run, attempt)
            # Runs that share GPUs have each noted all of these.
            result[place] = result.get(place, 0.0) + joules / (attempt.pack if attempt.share_gpu else 1)
    return result


def gpus_now(record: RunRecord) -> dict[str, float | None]:
    """The series of a run that runs, by name; None where its nodes have no figures.

    Args:
        record: The run.
    """
    newest = map(newest_sample, newest_load_files(record.directory, record.listed.job_id))
    samples = [sample for sample in newest if sample is not None]
    use, memory, power = (
        [value for sample in samples for value in sample.of_gpus(figure).values()]
        for figure in (UTILIZATION, GPU_MEMORY, POWER)
    )
    return {
        "run_gpu_utilization_ratio": fmean(use) / 100 if use else None,
        "run_gpu_memory_bytes": sum(memory) * _MEGABYTE if memory else None,
        "run_gpu_power_watts": sum(power) if power else None,
    }
