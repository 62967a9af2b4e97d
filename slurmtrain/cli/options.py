"""How commands are declared, the arguments and options that several share, the workspace, and completion by Tab."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from slurmtrain.cli import formatting, output
from slurmtrain.config import EXECUTORS, Config, load_config
from slurmtrain.errors import SlurmtrainError
from slurmtrain.model.run.layout import is_run_id
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.inherited import current_directory, expand_home
from slurmtrain.system.locks import notices_to

if TYPE_CHECKING:
    from slurmtrain.registry.glance import Glimpse

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
    """Make a command ``x`` of a function ``x_command``, whose first argument is the Workspace.

    The command has ``--runs`` and ``--debug``, which the program has too. A test parses the examples, and demands some
    of every command.

    Args:
        *calls: Examples, without the program's name, for the end of the command's help.
        looks: It only looks: if Slurm does not answer, it shows what is known after a few seconds.
        group: The command that this is a command of; None: the program.
        **attributes: For click.
    """

    def decorate(function: Callable[..., int]) -> Any:
        def outer(*args: Any, **kwargs: Any) -> int:
            kwargs.pop("debug")  # main() looks for it before anything is parsed
            selected = workspace(kwargs.pop("runs"))
            if looks:
                selected.patience_s = _PATIENCE_S
            with notices_to(output.note):
                return function(selected, *args, **kwargs)

        adopted = _adopt(
            function,
            outer,
            click.option("--runs", metavar="DIR", help="The directory of all runs."),
            click.option("--debug", is_flag=True, help="Show tracebacks of errors."),
        )
        return (group or click).command(epilog=examples(*calls), **attributes)(adopted)

    return decorate


def examples(*calls: str) -> str:
    """The end of a command's help: what to type, each call without the program's name."""
    # click leaves a paragraph that begins so as it is.
    return "\n".join(["\b", f"Example{'s' * (len(calls) > 1)}:", *(f"  slurmtrain {call}" for call in calls)])


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


# --- what a shell offers when Tab is pressed --------------------------------------------------------------------------

# Functions for click's ``shell_complete``: they look and never act, and say nothing, since a warning would appear in
# the line that is being typed.

# Where nothing is typed yet, names say more than ids.
_NEWEST_IDS = 20
# What no shell takes for anything but itself, and the home directory in front of a path.
_WORD = re.compile(r"(?:~/)?[\w@%+=:,./-]*")

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
Candidates = Callable[[click.Context, str], Iterable[CompletionItem]]


def _completing(candidates: Candidates) -> Complete:
    """A function for click that offers the candidates that begin as the word does, and fails silently."""

    @wraps(candidates)
    def complete(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        with contextlib.suppress(SlurmtrainError, OSError, ValueError):
            items = candidates(context, incomplete)
            # A shell has to take it as it is: bash inserts it unquoted, and would run what some names of runs say.
            return [
                CompletionItem(item.value, help=item.help and output.printable(item.help))
                for item in items
                if item.value.startswith(incomplete)
                and _WORD.fullmatch(item.value)
                and (not item.value.startswith("-") or incomplete.startswith("-"))
            ]
        return []

    return complete


def _in_lists(candidates: Candidates) -> Candidates:
    """The same candidates for the last word of a list, which commas separate, and which a minus may precede."""

    def complete(context: click.Context, incomplete: str) -> Iterator[CompletionItem]:
        before, comma, word = incomplete.rpartition(",")
        sign = "-" if word.startswith("-") else ""
        for item in candidates(context, word.removeprefix("-")):
            yield CompletionItem(f"{before}{comma}{sign}{item.value}", help=item.help)

    return complete


def _config(context: click.Context) -> Config:
    runs = next((runs for each in (context, context.parent) if each and (runs := each.params.get("runs"))), None)
    return load_config(cwd=current_directory(), environ=os.environ, runs=runs)


def _glimpses(context: click.Context) -> list[Glimpse]:
    """The runs that the registry knows, newest first, and before them runs that no command has read yet."""
    from slurmtrain.registry.glance import Glimpse, glance

    config = _config(context)
    known_runs = glance(config.registry)
    ids = {run.id for run in known_runs}
    with contextlib.suppress(OSError):
        unread = sorted((name for name in os.listdir(config.runs) if is_run_id(name) and name not in ids), reverse=True)
        return [*(Glimpse(run_id, "", "") for run_id in unread), *known_runs]
    return known_runs


def _run_items(context: click.Context, incomplete: str) -> Iterator[CompletionItem]:
    runs = _glimpses(context)
    yield CompletionItem("@last", help="the newest run")
    names: dict[str, list[Glimpse]] = {}
    for run in runs:
        names.setdefault(run.name, []).append(run)
    for run in runs if incomplete else runs[:_NEWEST_IDS]:
        yield CompletionItem(run.id, help=f"{run.name} {run.state}" if run.name else None)
    for name, of_name in names.items():
        if name:
            yield CompletionItem(name, help=of_name[0].state if len(of_name) == 1 else f"{len(of_name)} runs")
    yield from _items_of_sweeps(runs)


def _items_of_sweeps(runs: Iterable[Glimpse]) -> Iterator[CompletionItem]:
    sweeps: dict[str, list[Glimpse]] = {}
    for run in runs:
        if run.sweep:
            sweeps.setdefault(run.sweep, []).append(run)
    for sweep, of_sweep in sweeps.items():
        # No comma: click's script for fish splits there.
        yield CompletionItem(sweep, help=f"sweep of {len(of_sweep)} runs of {of_sweep[0].name}")


def _metric_items(context: click.Context, incomplete: str) -> list[CompletionItem]:
    """Metrics by their own names, or as fields or in measures for users who type them as such."""
    from slurmtrain.model.query.measures import KINDS

    prefixes = ("metrics.", *(f"{kind}:" for kind in KINDS))
    prefix = next((each for each in prefixes if incomplete.startswith(each)), "")
    return _unique(f"{prefix}{metric}" for run in _glimpses(context) for metric in run.metrics)


def _field_items(context: click.Context, incomplete: str) -> list[CompletionItem]:
    from slurmtrain.model.diagnosis.usage import RESOURCES
    from slurmtrain.ops.shared.views import FIELDS

    params = (f"params.{param}" for run in _glimpses(context) for param in run.params)
    metrics = _metric_items(context, incomplete if ":" in incomplete else "metrics.")
    costs = (f"cost.{part}" for part in ("spent", "lost", "saving", "on_demand", "interruptions", "unit"))
    figures = ("", ".used", ".asked", ".suffices", ".request", ".why")
    usage = (f"usage.{resource}{figure}" for resource in RESOURCES for figure in figures)
    return [*_unique(FIELDS), *_unique(costs), *_unique(usage), *_unique(params), *metrics]


@_completing
@_in_lists
def complete_params(context: click.Context, incomplete: str) -> list[CompletionItem]:
    """Names of parameters, separated by commas."""
    prefix = "params." if incomplete.startswith("params.") else ""
    return _unique(f"{prefix}{param}" for run in _glimpses(context) for param in run.params)


def _tag_items(context: click.Context, _incomplete: str) -> list[CompletionItem]:
    return _unique(tag for run in _glimpses(context) for tag in run.tags)


@_completing
@_in_lists
def complete_states(_context: click.Context, _incomplete: str) -> list[CompletionItem]:
    """States of runs, separated by commas."""
    from slurmtrain.model.run.run import RUN_STATES

    return _unique(RUN_STATES)


def _unique(words: Iterable[str]) -> list[CompletionItem]:
    return [CompletionItem(word) for word in dict.fromkeys(words)]


def _spec_items(_context: click.Context, incomplete: str) -> Iterator[CompletionItem]:
    """Files of YAML, and directories, which may contain some."""
    folder, slash, _ = incomplete.rpartition("/")
    for path in sorted(expand_home(f"{folder}{slash}" or ".").iterdir()):
        if path.is_dir() and not path.name.startswith("."):
            yield CompletionItem(f"{folder}{slash}{path.name}/")
        elif path.suffix in (".yaml", ".yml"):
            yield CompletionItem(f"{folder}{slash}{path.name}")


def _override_items(context: click.Context, incomplete: str) -> list[CompletionItem]:
    from slurmtrain.model.experiment.spec import complete_override

    return _unique(complete_override(incomplete, _spec(context)))


@_completing
def complete_spec_or_override(context: click.Context, incomplete: str) -> list[CompletionItem]:
    """Another spec, or a key of the first one."""
    with contextlib.suppress(OSError):
        return [*_override_items(context, incomplete), *_spec_items(context, incomplete)]
    return _override_items(context, incomplete)


def _spec(context: click.Context) -> Mapping[str, Any]:
    """The spec that the command line names, or the spec of the run that it names; empty if it cannot be read."""
    path = context.params.get("spec")
    if path is None and "spec" in context.params:
        # Click has stopped at an option whose value is being typed, before it named the words in front of it.
        path = next(iter(context.args), None)
    if path is None and (run := context.params.get("run")):
        ids = [each.id for each in _glimpses(context) if run in (each.id, each.name, "@last")]
        path = _config(context).runs / ids[0] / "spec.yaml" if ids else None
    if path is None:
        return {}
    import yaml

    with contextlib.suppress(OSError, yaml.YAMLError, ValueError):
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


complete_run = _completing(_run_items)
complete_run_or_tag = _completing(lambda context, word: [*_run_items(context, word), *_tag_items(context, word)])
complete_run_or_metric = _completing(lambda context, word: [*_run_items(context, word), *_metric_items(context, word)])
complete_run_or_spec = _completing(lambda context, word: [*_run_items(context, word), *_spec_items(context, word)])
complete_sweep = _completing(lambda context, _: _items_of_sweeps(_glimpses(context)))
complete_tag = _completing(_tag_items)
complete_metric = _completing(_metric_items)
complete_metrics = _completing(_in_lists(_metric_items))
complete_field = _completing(_field_items)
complete_fields = _completing(_in_lists(_field_items))
complete_spec = _completing(_spec_items)
complete_override = _completing(_override_items)


# --- arguments and options --------------------------------------------------------------------------------------------

run_argument = click.argument("run", metavar="RUN", shell_complete=complete_run)
maybe_run_argument = click.argument("run", metavar="[RUN]", required=False, shell_complete=complete_run)
runs_argument = click.argument("names", metavar="RUN...", nargs=-1, required=True, shell_complete=complete_run)
some_runs_argument = click.argument("names", metavar="[RUN]...", nargs=-1, shell_complete=complete_run)
verbose_option = click.option("-v", "--verbose", is_flag=True, help="List all runs, however many they are.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
csv_option = click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values.")
executor_option = click.option(
    "--executor", type=click.Choice(EXECUTORS), help="Where the runs start: this machine or Slurm."
)
wait_option = click.option(
    "--wait", "waits", is_flag=True, help="Wait until the runs have ended; exit with their outcome."
)
larger_option = click.option(
    "--max/--min", "larger", default=None, help="Larger or smaller is better; by default its name decides."
)
interval_option = click.option(
    "--interval", metavar="S", type=Seconds(0.5), default=2.0, show_default=True,
    help="Seconds between refreshes, at least 0.5.",
)  # fmt: skip
spec_argument = click.argument("spec", metavar="SPEC", type=click.Path(path_type=Path), shell_complete=complete_spec)
overrides_argument = click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1, shell_complete=complete_override)
sweep_option = click.option(
    "--sweep", metavar="KEY=VALUE,VALUE", multiple=True, help="Submit a run for each value; several sweeps multiply.",
    shell_complete=complete_override,
)  # fmt: skip


def split_words(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    """The words of ``value``, which commas separate; click also passes the ``_context`` and the ``_parameter``."""
    return tuple(word for part in (value or "").split(",") if (word := part.strip()))


def _params(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Names of parameters, as fields."""
    return tuple(f"params.{word.removeprefix('params.')}" for word in split_words(context, parameter, value))


over_option = click.option(
    "--over", metavar="PARAM[,PARAM]", callback=_params, shell_complete=complete_params,
    help="Average runs that differ only in these parameters.",
)  # fmt: skip
where_option = click.option(
    "--where", metavar="CONDITION", multiple=True, shell_complete=complete_field,
    help="Only runs that meet this condition, such as 'params.lr < 0.1 and state = completed'.",
)  # fmt: skip
since_option = click.option(
    "--since", metavar="WHEN", help="Only runs submitted since 2026-11-22, 2026-11-22T10:30, or 2w ago."
)
# The options of ``status`` that choose runs by what is known about them, by the names that a Question has for them.
_QUESTION_OPTIONS = {
    "where": where_option,
    "states": click.option(
        "--state", "states", metavar="S[,S]", callback=split_words, shell_complete=complete_states,
        help="Only runs in one of these states.",
    ),
    "causes": click.option(
        "--cause", "causes", metavar="C[,C]", callback=split_words, help="Only runs that ended for one of these causes."
    ),
    "since": since_option,
    "tags": click.option(
        "--tag", "tags", metavar="TAG", multiple=True, shell_complete=complete_tag,
        help="Only runs with this tag.",
    ),
    "sweep": click.option(
        "--sweep", metavar="ID", shell_complete=complete_sweep, help="Only runs of this sweep."
    ),
    "node": click.option("--node", metavar="HOST", help="Only runs on this node; a pattern may match several."),
    "sort": click.option(
        "--sort", metavar="KEY[,KEY]", shell_complete=complete_fields,
        help="Sort by fields, such as -metrics.val_loss or min:loss; a minus sorts downwards.",
    ),
    "limit": click.option("--limit", metavar="N", type=click.IntRange(min=1), help="List at most this many runs."),
    "columns": click.option(
        "--columns", metavar="FIELD[,FIELD]", callback=split_words, shell_complete=complete_fields,
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
    # Like decorators, which apply from the bottom up: --help lists them in the order above.
    for option in reversed(_QUESTION_OPTIONS.values()):
        adopted = option(adopted)
    return adopted
