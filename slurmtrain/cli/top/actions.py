"""What keys do to a run, each in a thread of its own, with the same functions as the commands of that name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurmtrain.cli.shared import formatting
from slurmtrain.cli.top.look import describe
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.config import Config

# How long a run that trains may take to save, in seconds: as 'slurmtrain checkpoint' waits.
_SAVE_S = 600.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an action, in a sentence."""

    text: str
    good: bool = True


@dataclass(frozen=True, slots=True)
class Action:
    """Something that can be done to a run.

    ``doing``: what is shown while it is done, ``{run}`` standing for the run. ``question``: what is asked first; empty:
    nothing. ``do``: returns the outcome, or raises.
    """

    doing: str
    question: str
    do: Callable[[Workspace, str], Outcome]

    def ask(self, run: Mapping[str, Any]) -> str:
        """The question about ``run`` (RUN of the JSON contract)."""
        steps = "" if run["step"] is None else f", step {formatting.steps(run)}"
        return self.question.format(run=f"{run['name']} {run['id']} ({run['state']}{steps})")


def _cancel(workspace: Workspace, run_id: str) -> Outcome:
    from slurmtrain.ops.cancel import cancel

    run = cancel(workspace, [run_id])[run_id]
    reason = f": {run.reason}" if run.reason not in ("", run.state) else ""
    return Outcome(f"run {run_id} is {run.state}{reason}", run.ended)


def _resume(workspace: Workspace, run_id: str) -> Outcome:
    from slurmtrain.ops.resume import resume

    _, notes = resume(workspace, run_id)
    return Outcome("; ".join([f"run {run_id} was started again", *notes]))


def _checkpoint(workspace: Workspace, run_id: str) -> Outcome:
    from slurmtrain.cli.checkpoint import describe_outcome
    from slurmtrain.ops.checkpoint import request_checkpoint, wait_for_checkpoint

    request = request_checkpoint(workspace, run_id)
    outcome = wait_for_checkpoint(workspace, request, _SAVE_S)
    return Outcome(f"run {run_id}: {describe_outcome(outcome, request, _SAVE_S)}", outcome.checkpoint is not None)


CANCEL = Action("cancelling run {run}", "Cancel {run}? It saves before it ends.", _cancel)
RESUME = Action("resuming run {run}", "Resume {run} from its newest checkpoint?", _resume)
CHECKPOINT = Action("run {run} saves at the end of its step", "", _checkpoint)


class Actions:
    """The actions under way."""

    def __init__(self, config: Config, report: Callable[[Outcome], None]) -> None:
        """``report``: called in the action's thread once it has ended."""
        self._config = config
        self._report = report
        self._under_way: dict[str, threading.Thread] = {}

    @property
    def under_way(self) -> list[str]:
        """What is being done."""
        return [doing for doing, thread in self._under_way.items() if thread.is_alive()]

    def start(self, action: Action, run_id: str) -> str:
        """Begin an ``action`` on a run, unless it is already being done; returns what is being done."""
        doing = action.doing.format(run=run_id)
        if doing in self.under_way:
            return f"already {doing}"
        self._under_way = {name: thread for name, thread in self._under_way.items() if thread.is_alive()}
        # A daemon: whoever leaves may decide not to wait for it.
        thread = threading.Thread(target=self._do, args=(action, run_id), daemon=True)
        self._under_way[doing] = thread
        thread.start()
        return doing

    def wait(self) -> None:
        """Wait until all have ended."""
        for thread in self._under_way.values():
            thread.join()

    def _do(self, action: Action, run_id: str) -> None:
        notes: list[str] = []
        try:
            # A workspace of its own, as a command has: the registry is not shared between threads.
            outcome = action.do(Workspace(self._config, warn=notes.append), run_id)
        except Exception as error:  # noqa: BLE001 (shown, since an action must not end the page)
            outcome = Outcome(describe(error), good=False)
        self._report(Outcome("; ".join([outcome.text, *notes]), outcome.good))
