"""The runs of a sweep before they are submitted: the varying keys, and the possible cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurmtrain.cli.shared import output
from slurmtrain.cli.shared.tables import print_table
from slurmtrain.model.query.differing import write_value

if TYPE_CHECKING:
    from slurmtrain.ops.submit.preview import Preview


def print_preview(preview: Preview) -> None:
    """Print a table with a line for each run, or for each key of a search, and the cost of all."""
    if preview.search is not None:
        print_table(["KEY", "VALUES"], [[key, str(space)] for key, space in preview.search.space.items()])
        output.echo("", preview.search.describe())
    elif preview.keys:
        rows = [
            [str(number), *(write_value(run.varies[key]) if key in run.varies else "" for key in preview.keys)]
            for number, run in enumerate(preview.runs, 1)
        ]
        print_table(["RUN", *preview.keys], rows)
        output.echo("")
    output.echo(str(preview.cost))
