"""What a shell offers when Tab is pressed: functions for click's ``shell_complete``.

They look and never act, and say nothing: a warning would appear in the line that is being typed. They import little.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from slurmtrain.cli.output import printable
from slurmtrain.config import Config, load_config
from slurmtrain.errors import SlurmtrainError
from slurmtrain.model.run.layout import is_run_id
from slurmtrain.system.inherited import current_directory, expand_home

if TYPE_CHECKING:
    from slurmtrain.registry.glance import Glimpse

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
            return [
                CompletionItem(item.value, help=item.help and printable(item.help))
                for item in items
                if item.value.startswith(incomplete) and _is_word(item.value, incomplete)
            ]
        return []

    return complete


def _is_word(text: str, incomplete: str) -> bool:
    """Whether a shell takes a text as it is: bash inserts it unquoted, and would run what some names of runs say."""
    return _WORD.fullmatch(text) is not None and (not text.startswith("-") or incomplete.startswith("-"))


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
    from slurmtrain.ops.shared.views import FIELDS

    params = (f"params.{param}" for run in _glimpses(context) for param in run.params)
    metrics = _metric_items(context, incomplete if ":" in incomplete else "metrics.")
    return [*_unique(FIELDS), *_unique(params), *metrics]


def _param_items(context: click.Context, incomplete: str) -> list[CompletionItem]:
    prefix = "params." if incomplete.startswith("params.") else ""
    return _unique(f"{prefix}{param}" for run in _glimpses(context) for param in run.params)


def _tag_items(context: click.Context, _incomplete: str) -> list[CompletionItem]:
    return _unique(tag for run in _glimpses(context) for tag in run.tags)


def _state_items(_context: click.Context, _incomplete: str) -> list[CompletionItem]:
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


def _spec_or_override_items(context: click.Context, incomplete: str) -> list[CompletionItem]:
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
complete_params = _completing(_in_lists(_param_items))
complete_states = _completing(_in_lists(_state_items))
complete_spec = _completing(_spec_items)
complete_override = _completing(_override_items)
complete_spec_or_override = _completing(_spec_or_override_items)
