"""What a command prints besides tables: one JSON object, warnings."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from slurmtrain.ops.shared.observe import Observed


def print_json(data: Mapping[str, Any]) -> None:
    """Print one JSON object to standard output."""
    json.dump(data, sys.stdout, indent=None if not sys.stdout.isatty() else 1, allow_nan=False)
    sys.stdout.write("\n")
    sys.stdout.flush()


def warn(messages: Iterable[str]) -> None:
    """Print warnings to standard error."""
    for message in messages:
        click.echo(f"warning: {message}", err=True)


def warn_about(observed: Observed) -> None:
    """Warn about failed queries and about journals with unreadable lines; 'show --json' has those lines."""
    warn(observed.problems)
    counts: dict[tuple[str, str], list[int]] = {}
    for run_id, bad in observed.garbage:
        counts.setdefault((run_id, bad.source), []).append(bad.offset)
    warn(
        f"run {run_id}: {len(offsets)} unreadable line(s) in {source}, first at byte {offsets[0]}; the rest was read"
        for (run_id, source), offsets in counts.items()
    )
