"""Arguments and options shared by several commands, and the workspace that they select."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from slurmtrain.cli.shared import complete, output, times
from slurmtrain.config import EXECUTORS, load_config
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.inherited import current_directory

F = TypeVar("F", bound=Callable[..., Any])
# Longer than any run, and short enough for every system call that waits.
_LONGEST_S = 10.0 * 365 * 86400
# Seconds that a command which only looks waits for Slurm, whose own commands give up after half a minute.
_PATIENCE_S = 5.0


class Seconds(click.ParamType[float]):
    """A finite number of seconds, of at least ``least``; numbers beyond ten years mean ten years."""

    name = "seconds"

    def __init__(self, least: float = 0.0) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number that ``value``, text or a default, stands for; a usage error names ``param`` in ``ctx``."""
        try:
            seconds = float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number", param, ctx)
        # Not a number compares as neither.
        if not seconds >= self._least:
            self.fail(f"{value} is not at least {self._least:g}", param, ctx)
        return min(seconds, _LONGEST_S)


def examples(*calls: str) -> str:
    """The end of a command's help: what to type, each call without the program's name.

    A test parses them, and demands some of every command.
    """
    # click leaves a paragraph that begins so as it is.
    return "\n".join(["\b", f"Example{'s' * (len(calls) > 1)}:", *(f"  slurmtrain {call}" for call in calls)])


def in_workspace(command: F) -> F:
    """Add ``--runs`` and ``--debug``, which the group has too, and pass a Workspace as the first argument."""

    def outer(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("debug")  # main() looks for it before anything is parsed
        return command(workspace(kwargs.pop("runs")), *args, **kwargs)

    outer.__doc__, outer.__name__ = command.__doc__, command.__name__
    decorated: Any = outer
    decorated = click.option("--debug", is_flag=True, help="Show tracebacks of errors.")(decorated)
    decorated = click.option("--runs", metavar="DIR", help="The directory of all runs.")(decorated)
    decorated.__click_params__ = [
        *getattr(decorated, "__click_params__", []),
        *getattr(command, "__click_params__", []),
    ]
    result: F = decorated
    return result


def looks(command: F) -> F:
    """Let a command that only looks show what is known after a few seconds if Slurm does not answer."""

    @functools.wraps(command)
    def outer(workspace: Workspace, *args: Any, **kwargs: Any) -> Any:
        workspace.patience_s = _PATIENCE_S
        return command(workspace, *args, **kwargs)

    result: Any = outer
    decorated: F = result
    return decorated


def workspace(runs: str | None = None, executor: str | None = None) -> Workspace:
    """The workspace of the runs root selected by command line, environment and configuration.

    ``runs``: the command's --runs, which overrides the group's. ``executor``: its --executor.
    """
    context = click.get_current_context(silent=True)
    outer = (context.obj or {}).get("runs") if context is not None else None
    config = load_config(cwd=current_directory(), environ=os.environ, runs=runs or outer, executor=executor)
    output.warn(config.notes)
    return Workspace(config, warn=lambda message: output.warn([times.localized(message)]))


run_argument = click.argument("run", metavar="RUN", shell_complete=complete.complete_run)
maybe_run_argument = click.argument("run", metavar="[RUN]", required=False, shell_complete=complete.complete_run)
runs_argument = click.argument("names", metavar="RUN...", nargs=-1, required=True, shell_complete=complete.complete_run)
some_runs_argument = click.argument("names", metavar="[RUN]...", nargs=-1, shell_complete=complete.complete_run)
runs_and_tag_argument = click.argument(
    "words", metavar="RUN... TAG", nargs=-1, required=True, shell_complete=complete.complete_run_or_tag
)
runs_and_metric_argument = click.argument(
    "words", metavar="RUN... [METRIC]", nargs=-1, required=True, shell_complete=complete.complete_run_or_metric
)
interval_option = click.option(
    "--interval",
    metavar="S",
    type=Seconds(0.5),
    default=2.0,
    show_default=True,
    help="Seconds between refreshes, at least 0.5.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
executor_option = click.option("--executor", type=click.Choice(EXECUTORS), help="What starts the runs.")
spec_argument = click.argument(
    "spec", metavar="SPEC", type=click.Path(path_type=Path), shell_complete=complete.complete_spec
)
overrides_argument = click.argument(
    "overrides", metavar="[KEY=VALUE]...", nargs=-1, shell_complete=complete.complete_override
)
specs_and_overrides_argument = click.argument(
    "overrides",
    metavar="[SPEC]... [KEY=VALUE]...",
    nargs=-1,
    shell_complete=complete.complete_spec_or_override,
)
sweep_option = click.option(
    "--sweep",
    metavar="KEY=VALUE,VALUE",
    multiple=True,
    help="Submit a run for each value; several sweeps multiply.",
    shell_complete=complete.complete_override,
)
