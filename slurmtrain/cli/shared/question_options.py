"""The options of ``status`` that choose runs by what is known about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from slurmtrain.cli.shared import complete
from slurmtrain.ops.query.select import Question

F = TypeVar("F", bound=Callable[..., Any])


def split_words(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    """The words of ``value``, which commas separate; click also passes the ``_context`` and the ``_parameter``."""
    return tuple(word for part in (value or "").split(",") if (word := part.strip()))


def _params(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Names of parameters, as fields."""
    return tuple(f"params.{word.removeprefix('params.')}" for word in split_words(context, parameter, value))


over_option = click.option(
    "--over",
    metavar="PARAM[,PARAM]",
    callback=_params,
    shell_complete=complete.complete_params,
    help="Runs that differ only in these count as one, by their mean.",
)
where_option = click.option(
    "--where",
    metavar="CONDITION",
    multiple=True,
    help="Only runs of which this holds, such as 'params.lr < 0.1 and state = completed'.",
    shell_complete=complete.complete_field,
)
_OPTIONS = (
    where_option,
    click.option(
        "--state",
        "states",
        metavar="S[,S]",
        callback=split_words,
        shell_complete=complete.complete_states,
        help="Only runs in one of these states.",
    ),
    click.option(
        "--cause", "causes", metavar="C[,C]", callback=split_words, help="Only runs that ended for one of them."
    ),
    click.option("--since", metavar="WHEN", help="Only runs submitted since 2026-11-22, 2026-11-22T10:30, or 2w ago."),
    click.option(
        "--tag",
        "tags",
        metavar="TAG",
        multiple=True,
        shell_complete=complete.complete_tag,
        help="Only runs with this tag.",
    ),
    click.option("--sweep", metavar="ID", shell_complete=complete.complete_sweep, help="Only runs of this sweep."),
    click.option("--node", metavar="HOST", help="Only runs on this node; a pattern may match several."),
    click.option(
        "--sort",
        metavar="KEY[,KEY]",
        shell_complete=complete.complete_fields,
        help="Sort by fields, such as -metrics.val_loss or min:loss; a minus: descending.",
    ),
    click.option("--limit", metavar="N", type=click.IntRange(min=1), help="List at most this many runs."),
    click.option(
        "--columns",
        metavar="FIELD[,FIELD]",
        callback=split_words,
        shell_complete=complete.complete_fields,
        help="Print these fields, such as id,params.lr,min:loss.",
    ),
)


def question_options(command: F) -> F:
    """Add the options, and pass a Question, without names, as ``question``."""

    def outer(*args: Any, **kwargs: Any) -> Any:
        chosen = {name: kwargs.pop(name) for name in _NAMES}
        return command(*args, **kwargs, question=Question(**chosen))

    outer.__doc__, outer.__name__ = command.__doc__, command.__name__
    decorated: Any = outer
    decorated.__click_params__ = [*getattr(command, "__click_params__", [])]
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    result: F = decorated
    return result


_NAMES = ("where", "states", "causes", "since", "tags", "sweep", "node", "sort", "limit", "columns")
