"""All about a run, as ``slurmtrain show`` prints it on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from slurmtrain.cli.shared import output
from slurmtrain.cli.show import print_run
from slurmtrain.cli.top.look import describe
from slurmtrain.errors import RunNotFound
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.run_details import show_json
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.config import Config

# Where the values begin in what show prints.
_INDENT = " " * 12


def report_lines(config: Config, run: Mapping[str, Any], columns: int) -> list[str]:
    """The lines, or why the run cannot be read. Never raises.

    Args:
        config: The runs root.
        run: RUN of the JSON contract, with what Slurm says now: it is not asked again.
        columns: How wide the terminal is.
    """
    try:
        facts = _read(Workspace(config), run)
        with output.collected(columns) as printed:
            print_run(facts)
    except Exception as error:  # noqa: BLE001 (shown, since it must not end the page)
        return list(wrapped([describe(error)], columns))
    return list(wrapped(printed.getvalue().splitlines(), columns))


def _read(workspace: Workspace, run: Mapping[str, Any]) -> dict[str, Any]:
    observed = observe(workspace, [run["id"]], thorough=True, ask_slurm=False)
    loaded = workspace.store.load(run["id"])
    if loaded is None:
        raise RunNotFound(f"there is no run {run['id']} any more: its directory was deleted")
    facts = show_json(workspace, observed.runs[run["id"]], loaded)
    return {**facts, "reason": run["reason"], "pending": run["pending"]} if facts["state"] == run["state"] else facts


def wrapped(lines: list[str], columns: int) -> Iterator[str]:
    """These ``lines``, the long ones broken between words to fit in so many ``columns``."""
    for line in lines:
        if cell_len(line) <= columns:
            yield line
        else:
            yield from wrap(line, columns, subsequent_indent=_INDENT, break_on_hyphens=False)
