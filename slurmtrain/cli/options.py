"""How commands are declared, the arguments and options that several of them share, and the workspace they select."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from slurmtrain.cli import complete, formatting, output
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


# --- commands ---------------------------------------------------------------------------------------------------------


def command(
    *calls: str, looks: bool = False, group: click.Group | None = None, **attributes: Any
) -> Callable[[Callable[..., int]], Any]:
    """Make a command of a function of the same name, whose first argument is the Workspace.

    The command has ``--runs`` and ``--debug``, which the program has too. A test parses the examples, and demands some
    of every command.

    Args:
        *calls: Examples, without the program's name, for the end of the command's help.
        looks: It only looks: if Slurm does not answer, it shows what is known after a few seconds.
        group: The command that this is a command of; None: the program.
        **attributes: For click.
    """

    def decorate(function: Callable[..., int]) -> Any:
        return (group or click).command(epilog=examples(*calls), **attributes)(_in_workspace(function, looks=looks))

    return decorate


def examples(*calls: str) -> str:
    """The end of a command's help: what to type, each call without the program's name."""
    # click leaves a paragraph that begins so as it is.
    return "\n".join(["\b", f"Example{'s' * (len(calls) > 1)}:", *(f"  slurmtrain {call}" for call in calls)])


def _in_workspace(function: Callable[..., int], *, looks: bool) -> Callable[..., int]:
    def outer(*args: Any, **kwargs: Any) -> int:
        kwargs.pop("debug")  # main() looks for it before anything is parsed
        selected = workspace(kwargs.pop("runs"))
        if looks:
            selected.patience_s = _PATIENCE_S
        return function(selected, *args, **kwargs)

    adopted: Callable[..., int] = _adopt(
        function,
        outer,
        click.option("--runs", metavar="DIR", help="The directory of all runs."),
        click.option("--debug", is_flag=True, help="Show tracebacks of errors."),
    )
    return adopted


def _adopt(inner: F, outer: Any, *options: Callable[[Any], Any]) -> Any:
    """``outer`` as the command that ``inner`` would be, with these options behind the other ones."""
    outer.__doc__, outer.__name__, outer.__click_params__ = inner.__doc__, inner.__name__, []
    for option in reversed(options):
        outer = option(outer)
    outer.__click_params__ += getattr(inner, "__click_params__", [])
    return outer


def workspace(runs: str | None = None, executor: str | None = None) -> Workspace:
    """The workspace of the runs root selected by command line, environment and configuration.

    ``runs``: the command's --runs, which overrides the group's. ``executor``: its --executor.
    """
    context = click.get_current_context(silent=True)
    outer = (context.obj or {}).get("runs") if context is not None else None
    config = load_config(cwd=current_directory(), environ=os.environ, runs=runs or outer, executor=executor)
    output.warn(config.notes)
    return Workspace(config, warn=lambda message: output.warn([formatting.localized(message)]))


# --- arguments and options --------------------------------------------------------------------------------------------

run_argument = click.argument("run", metavar="RUN", shell_complete=complete.complete_run)
maybe_run_argument = click.argument("run", metavar="[RUN]", required=False, shell_complete=complete.complete_run)
runs_argument = click.argument("names", metavar="RUN...", nargs=-1, required=True, shell_complete=complete.complete_run)
some_runs_argument = click.argument("names", metavar="[RUN]...", nargs=-1, shell_complete=complete.complete_run)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
csv_option = click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values.")
executor_option = click.option("--executor", type=click.Choice(EXECUTORS), help="What starts the runs.")
wait_option = click.option(
    "--wait", "waits", is_flag=True, help="Wait until the runs have ended; exit with their outcome."
)
larger_option = click.option(
    "--max/--min", "larger", default=None, help="Larger or smaller is better; by default by its name."
)
interval_option = click.option(
    "--interval", metavar="S", type=Seconds(0.5), default=2.0, show_default=True,
    help="Seconds between refreshes, at least 0.5.",
)  # fmt: skip
spec_argument = click.argument(
    "spec", metavar="SPEC", type=click.Path(path_type=Path), shell_complete=complete.complete_spec
)
overrides_argument = click.argument(
    "overrides", metavar="[KEY=VALUE]...", nargs=-1, shell_complete=complete.complete_override
)
sweep_option = click.option(
    "--sweep", metavar="KEY=VALUE,VALUE", multiple=True, help="Submit a run for each value; several sweeps multiply.",
    shell_complete=complete.complete_override,
)  # fmt: skip


def split_words(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    """The words of ``value``, which commas separate; click also passes the ``_context`` and the ``_parameter``."""
    return tuple(word for part in (value or "").split(",") if (word := part.strip()))


def _params(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Names of parameters, as fields."""
    return tuple(f"params.{word.removeprefix('params.')}" for word in split_words(context, parameter, value))


over_option = click.option(
    "--over", metavar="PARAM[,PARAM]", callback=_params, shell_complete=complete.complete_params,
    help="Runs that differ only in these count as one, by their mean.",
)  # fmt: skip
where_option = click.option(
    "--where", metavar="CONDITION", multiple=True, shell_complete=complete.complete_field,
    help="Only runs that meet it, such as 'params.lr < 0.1 and state = completed'.",
)  # fmt: skip
# The options of ``status`` that choose runs by what is known about them, by the names that a Question has for them.
_QUESTION_OPTIONS = {
    "where": where_option,
    "states": click.option(
        "--state", "states", metavar="S[,S]", callback=split_words, shell_complete=complete.complete_states,
        help="Only runs in one of these states.",
    ),
    "causes": click.option(
        "--cause", "causes", metavar="C[,C]", callback=split_words, help="Only runs that ended for one of them."
    ),
    "since": click.option(
        "--since", metavar="WHEN", help="Only runs submitted since 2026-11-22, 2026-11-22T10:30, or 2w ago."
    ),
    "tags": click.option(
        "--tag", "tags", metavar="TAG", multiple=True, shell_complete=complete.complete_tag,
        help="Only runs with this tag.",
    ),
    "sweep": click.option(
        "--sweep", metavar="ID", shell_complete=complete.complete_sweep, help="Only runs of this sweep."
    ),
    "node": click.option("--node", metavar="HOST", help="Only runs on this node; a pattern may match several."),
    "sort": click.option(
        "--sort", metavar="KEY[,KEY]", shell_complete=complete.complete_fields,
        help="Sort by fields, such as -metrics.val_loss or min:loss; a minus: descending.",
    ),
    "limit": click.option("--limit", metavar="N", type=click.IntRange(min=1), help="List at most this many runs."),
    "columns": click.option(
        "--columns", metavar="FIELD[,FIELD]", callback=split_words, shell_complete=complete.complete_fields,
        help="Print these fields, such as id,params.lr,min:loss.",
    ),
}  # fmt: skip


def question_options(command: F) -> F:
    """Add the options, and pass a Question, without names, as ``question``."""

    def outer(*args: Any, **kwargs: Any) -> Any:
        from slurmtrain.ops.query.select import Question

        chosen = {name: kwargs.pop(name) for name in _QUESTION_OPTIONS}
        return command(*args, **kwargs, question=Question(**chosen))

    adopted: F = _adopt(command, outer)
    for option in reversed(_QUESTION_OPTIONS.values()):
        adopted = option(adopted)
    return adopted
