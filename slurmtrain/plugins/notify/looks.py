"""The messages that ``sync`` sends about the runs it has read, and the command that tests receivers."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from slurmtrain.cli import options, output
from slurmtrain.errors import PathError, RequestRefused, RunNotFound
from slurmtrain.model.interruption.outlook import format_span
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.node_use import idle_of
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.why import explain
from slurmtrain.plugins.notify.delivery import OLDEST_S, Mailbox, NotDelivered, is_sent, send
from slurmtrain.plugins.notify.messages import Notice, notices_of, trial

if TYPE_CHECKING:
    from slurmtrain.ops.shared.observe import ListedRuns
    from slurmtrain.registry.rows import Listed

# One look must not keep the next restart waiting for receivers that are slow.
_LOOK_S = 30.0


def after_sync(workspace: Workspace, runs: ListedRuns) -> list[str]:
    """Send receivers what is new about runs; returns the problems of receivers.

    Args:
        workspace: Where the runs are.
        runs: The runs as they were just observed.
    """
    mailbox = Mailbox(workspace.config.notify, workspace.root.notices)
    since = max(time.time() - OLDEST_S, mailbox.begin())
    failed: set[str] = set()
    end = time.monotonic() + _LOOK_S
    for run_id, listed in runs.fetch([*runs.worth_listing(0), *runs.ended_since(since)]).items():
        if time.monotonic() > end:
            break
        # The notes of told facts are among the files of a run, and are deleted with them.
        if listed.row["deleted_at"] is not None or _is_told(mailbox, workspace, listed):
            continue
        run = workspace.store.load(run_id)
        if run is None or run.unreadable:
            continue
        notices = [*notices_of(run), *_idle(workspace, listed, run)]
        # A run whose directory is gone or cannot be written needs no message.
        with contextlib.suppress(OSError, PathError):
            fresh = [notice for notice in notices if notice.at >= since]
            mailbox.deliver(workspace.root.run(run_id), _explained(workspace, runs, run, fresh, mailbox), failed)
    return mailbox.problems()


def check_receivers(workspace: Workspace) -> list[str]:
    """The receivers that did not take the last message, each as a sentence, for ``doctor``."""
    return Mailbox(workspace.config.notify, workspace.root.notices).problems()


def _is_told(mailbox: Mailbox, workspace: Workspace, listed: Listed) -> bool:
    """Whether all receivers that want to know have been told of the end of a run, by its files alone."""
    if not listed.ended or listed.job_id is None:
        return False
    kind = "completed" if listed.state == "completed" else "failed"
    directory = workspace.root.run(listed.id).notices
    wanting = [name for name, receiver in mailbox.receivers.items() if receiver.wants(kind)]
    ended = [path.name for path in directory.glob(f"ended-{listed.job_id}.*.sent")]
    return bool(wanting) and all(any(each.endswith(f".{name}.sent") for each in ended) for name in wanting)


def _explained(
    workspace: Workspace, runs: ListedRuns, run: Run, notices: list[Notice], mailbox: Mailbox
) -> list[Notice]:
    """The notices that somebody is still to be told; the newest state in the words of ``why``."""
    directory = workspace.root.run(run.id).notices
    untold = [
        notice
        for notice in notices
        if any(
            receiver.wants(notice.kind, notice.number) and not is_sent(directory, notice.key, name)
            for name, receiver in mailbox.receivers.items()
        )
    ]
    if not any(notice.key.startswith("ended-") for notice in untold):
        return untold
    with contextlib.suppress(RunNotFound):
        headline = explain(workspace, runs, run.id, ask=False).headline
        return [replace(each, why=headline) if each.key.startswith("ended-") else each for each in untold]
    return untold


def _idle(workspace: Workspace, listed: Listed, run: Run) -> list[Notice]:
    """That a run does nothing, once for each of its attempts."""
    if listed.state != "running" or run.newest is None:
        return []
    if not any(receiver.wants("idle") for receiver in workspace.config.notify.values()):
        return []
    idle = idle_of(workspace.root.run(run.id), listed.job_id, listed.resources)
    if idle is None:
        return []
    verb = ("have" if idle.gpus > 1 else "has") + (" been idle" if idle.gpus else " computed nothing")
    now = time.time()
    return [
        Notice(
            key=f"idle-{run.newest.key}", kind="idle", at=now, run=run.id, name=run.name, state=run.state,
            why=f"{idle.subject} {verb} for {format_span(now - idle.since)}", step=run.step,
            total_steps=run.total_steps, attempt=run.newest.number,
        )
    ]  # fmt: skip


@options.command("notify", "notify --test", "notify --test slack", looks=True)
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--test", "tries", is_flag=True, help="Send each receiver a test message.")
def notify_command(workspace: Workspace, names: tuple[str, ...], tries: bool) -> int:
    """Show the receivers of notifications about runs, or only those called NAME; --test sends them a test message.

    Set receivers under 'notify' in the configuration: see docs/notify.md. Jobs, 'watch' and 'sync' send the messages.
    The exit code is 1 if a test message could not be delivered.
    """
    receivers = workspace.config.notify
    if not receivers:
        raise RequestRefused("the configuration has no 'notify', so there are no receivers: see docs/notify.md")
    if unknown := [name for name in names if name not in receivers]:
        raise RequestRefused(f"there is no receiver {unknown[0]!r} in 'notify'; there are {', '.join(receivers)}")
    mailbox = Mailbox(receivers, workspace.root.notices)
    good = True
    for name in names or receivers:
        receiver = receivers[name]
        output.echo(f"{name}: {', '.join(receiver.states)}")
        if tries:
            try:
                send(receiver, trial())
                output.echo("  test message sent")
                mailbox.note(name, "")
            except NotDelivered as error:
                good = False
                output.warn([f"notify.{name}: {error}"])
                mailbox.note(name, str(error))
    if not tries:
        output.warn(mailbox.problems())
    return 0 if good else 1
