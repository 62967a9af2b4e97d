"""The page of a scaling study, in the frame of all pages."""

from __future__ import annotations

from pathlib import Path

from slurmtrain.errors import UserError
from slurmtrain.model.query.comparison import count_states
from slurmtrain.plugins.report.facts import Facts, begin_facts
from slurmtrain.plugins.report.pages import build_page
from slurmtrain.plugins.scale.scale_tables import StudyTables
from slurmtrain.plugins.scale.study_columns import TableText
from slurmtrain.system.files import describe_os_error, write_atomically


def study_facts(tables: StudyTables, study: str) -> Facts:
    """The facts of the page: what ``--json`` prints, and sentences.

    Args:
        tables: The tables.
        study: The id or the name of the study.
    """
    states = [row.run.state for row in tables.rows]
    return {
        **begin_facts("scale", study, f"Scaling study {study}"),
        **tables.to_json(study),
        "sentences": TableText(tables).sentences(),
        "progress": "" if tables.is_complete else f"not complete: {count_states(states)}",
    }


def write_page(path: Path, tables: StudyTables, study: str) -> None:
    """Write the page. Raises UserError.

    Args:
        path: The file, which is replaced.
        tables: The tables.
        study: The id or the name of the study.
    """
    page = build_page(study_facts(tables, study))
    try:
        write_atomically(path, page.encode(), private=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {describe_os_error(error)}; --html names another file") from error
