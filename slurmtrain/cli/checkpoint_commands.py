"""The checkpoints of a run: ``checkpoints``, ``checkpoint``, ``verify`` and ``prune``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from slurmtrain.cli import formatting, options, output, tables
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.ops.request_checkpoint import RequestOutcome, SaveRequest
    from slurmtrain.ops.verify import Verified


@options.command("checkpoints digits", looks=True)
@options.run_argument
@click.option("--all", "with_pruned", is_flag=True, help="Include pruned checkpoints.")
@options.json_option
def checkpoints_command(workspace: Workspace, run: str, with_pruned: bool, as_json: bool) -> int:
    """List the checkpoints of RUN: why and how fast each was saved, and why it is kept.

    SECONDS is how long the save took, STALL how long it held up training. KEPT names the rule that keeps a checkpoint;
    without one, it is deleted after the next save. FORMAT stands beside checkpoints that the script wrote itself. FORKS
    are runs that began with a checkpoint; each has its own copy.
    """
    from slurmtrain.ops.shared.find import find
    from slurmtrain.ops.shared.observe import check_readable, observe
    from slurmtrain.ops.shared.run_details import checkpoints_json

    [run_id], _ = find(workspace, [run])
    # Thorough: a settled run is otherwise read again only if a folder has changed, which a growing journal does not do.
    output.warn_about(observe(workspace, [run_id], thorough=True))
    loaded = workspace.store.load(run_id)
    assert loaded is not None
    check_readable(loaded)
    facts = checkpoints_json(workspace, loaded, deleted_too=with_pruned)
    if as_json:
        output.print_json(facts)
    elif shown := facts["checkpoints"]:
        # What a script saves by itself has a format.
        own = any(each["format"] for each in shown)
        columns = "step size saved format files path" if own else "step size saved seconds stall why files kept"
        tables.print_checkpoints(columns + (" forks" if any(each["forks"] for each in shown) else ""), shown)
    else:
        output.echo(f"run {run_id} has no checkpoint" + ("" if with_pruned else " on disk"), err=True)
    return 0


@options.command("checkpoint @last")
@options.run_argument
@click.option("--no-wait", is_flag=True, help="Return without waiting for the checkpoint.")
@click.option(
    "--timeout", metavar="S", type=options.Seconds(), default=600.0, show_default=True,
    help="Seconds to wait for the checkpoint.",
)  # fmt: skip
@options.json_option
def checkpoint_command(workspace: Workspace, run: str, no_wait: bool, timeout: float, as_json: bool) -> int:
    """Ask RUN to save at the end of its current step, wait for the checkpoint, and print where it is.

    Training continues. Exits with 1 if the run could not save, ended without saving, or has not saved in time.
    """
    from slurmtrain.ops.request_checkpoint import RequestOutcome, request_checkpoint, wait_for_checkpoint
    from slurmtrain.ops.shared.find import find

    # The request itself asks Slurm, about this run alone.
    [run_id], _ = find(workspace, [run], ask_slurm=False)
    request = request_checkpoint(workspace, run_id)
    try:
        outcome = RequestOutcome("asked") if no_wait else wait_for_checkpoint(workspace, request, timeout)
    # Nothing takes the request back: it is in the run directory, where rank 0 finds it after its step.
    except KeyboardInterrupt:
        output.echo(f"stopped waiting; the run will still save ('slurmtrain checkpoints {run_id}' lists it)", err=True)
        raise
    if as_json:
        output.print_json(outcome.to_dict(workspace, request))
    elif outcome.checkpoint is not None:
        output.verbatim(str(workspace.root.run(run_id).path / outcome.checkpoint.path))
    output.echo(describe_outcome(outcome, request, timeout), err=True)
    # A checkpoint is success also if the attempt ended first, and saved on its way out.
    return 0 if outcome.outcome in ("asked", "saved") or outcome.checkpoint is not None else 1


def describe_outcome(outcome: RequestOutcome, request: SaveRequest, timeout: float) -> str:
    """What became of a request, in a sentence.

    Args:
        outcome: What became of it.
        request: The request.
        timeout: How many seconds it was waited for.
    """
    run_id, saved = request.run_id, outcome.checkpoint
    if saved is not None:
        stall = f"; training stalled for {formatting.number(saved.stall_s)} s" if saved.stall_s is not None else ""
        ended = f"{outcome.reason}; it saved before it ended: " if outcome.outcome == "ended" else ""
        return f"{ended}step {saved.step}, {formatting.size(saved.bytes)}{stall}"
    hint = f"'slurmtrain checkpoints {run_id}' lists its checkpoints"
    return {
        "asked": f"run {run_id} was asked; {hint}",
        "saved": f"run {run_id} has saved",
        "failed": f"run {run_id} could not save: {outcome.reason}; it keeps training, and its earlier checkpoints are "
        "intact",
        "ended": f"{outcome.reason} without saving since it was asked; {hint}",
        "late": f"run {run_id} has not saved within {timeout:g} s; it will still do so at the end of a step: {hint}. "
        f"If its steps never end, 'slurmtrain logs {run_id}' may show why",
    }[outcome.outcome]


@options.command("verify digits --step 600")
@options.run_argument
@click.option("--step", metavar="N", type=click.IntRange(min=0), help="Only the checkpoint of this step.")
@click.option("--sizes", is_flag=True, help="Compare sizes only, without reading files.")
@options.json_option
def verify_command(workspace: Workspace, run: str, step: int | None, sizes: bool, as_json: bool) -> int:
    """Compare the files of RUN's checkpoints with the sizes and hashes of their manifests.

    Checkpoints that the script wrote itself are checked as far as their format allows.

    Exits with 0 if all are good, with 1 if any is bad. It renames and deletes nothing.
    """
    from slurmtrain.cli.tables import byte_progress
    from slurmtrain.ops.shared.find import find
    from slurmtrain.ops.verify import verify

    [run_id], _ = find(workspace, [run], ask_slurm=False)
    with byte_progress() as show_bytes:
        verified = verify(workspace, run_id, step=step, hashes=not sizes, show=show_bytes)
    output.warn(verified.problems)
    if as_json:
        output.print_json(verified.to_dict())
    else:
        rows = [
            (formatting.number(each.step), formatting.size(each.bytes), each.result, each.reason or "-")
            for each in verified.checked
        ]
        tables.print_table(("STEP", "SIZE", "RESULT", "REASON"), rows)
    if not verified.all_good:
        output.echo(_advice(verified, step), err=True)
    return 0 if verified.all_good else 1


def _advice(verified: Verified, step: int | None) -> str:
    run_id, good = verified.run.id, verified.newest
    if not verified.bad:
        return f"'slurmtrain checkpoints {run_id}' lists what is there now"
    if step is not None:
        return f"'slurmtrain resume {run_id}' skips it; 'slurmtrain verify {run_id}' checks the others"
    if good is None:
        return f"none is good; 'slurmtrain resume --from-start {run_id}' starts from the beginning"
    # They are in the order of their steps, and a run resumes from the newest good one.
    older = verified.checked.index(good) > max(map(verified.checked.index, verified.bad))
    passed = "the bad ones are older" if older else "newer ones are skipped"
    at = good.path.name if good.step is None else f"step {good.step}"
    starts = "when it starts again, the run" if not verified.run.ended else f"'slurmtrain resume {run_id}'"
    return f"{starts} continues from {at}; {passed}"


@options.command("prune digits --dry-run")
@options.run_argument
@click.option("--dry-run", is_flag=True, help="Print what would be deleted, and delete nothing.")
@options.json_option
def prune_command(workspace: Workspace, run: str, dry_run: bool, as_json: bool) -> int:
    """Delete the checkpoints of RUN that its checkpoint.keep does not keep, as the run does after each save.

    Works while the run trains. Once the run has ended, it also deletes checkpoints that were left half-written. The
    newest checkpoint always stays. Exits with 1 if something could not be deleted.
    """
    from slurmtrain.ops.prune import prune
    from slurmtrain.ops.shared.find import find

    [run_id], _ = find(workspace, [run], ask_slurm=False)
    pruned = prune(workspace, run_id, dry=dry_run)
    output.warn(pruned.problems)
    if as_json:
        output.print_json(pruned.to_dict())
        return 1 if pruned.problems else 0
    rows = [(str(each.step), formatting.size(each.bytes), each.why, str(each.path)) for each in pruned.checkpoints]
    for leftover in pruned.leftovers:
        why = "complete: published" if leftover.complete else "half-written by an attempt that died"
        rows.append(("-", formatting.size(leftover.bytes), why, str(leftover.path)))
    if rows:
        tables.print_table(("STEP", "SIZE", "WHY", "PATH"), rows)
    for each in pruned.checkpoints:
        for fork in pruned.forks.get(each.step, ()):
            output.note(f"run {fork} began with step {each.step} and keeps its own copy")
    verb = "would be free" if dry_run else "are free now"
    output.note(f"run {run_id}: {f'{formatting.size(pruned.bytes)} {verb}' if rows else 'nothing to delete'}")
    return 1 if pruned.problems else 0
