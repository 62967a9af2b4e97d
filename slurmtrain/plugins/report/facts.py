"""The facts of a page, chosen by what a user names: a run, a sweep, or many runs.

Facts are JSON. All have ``kind``, ``id``, ``title``, ``as_of`` and ``version``; the rest is up to the kind. Figures are
those of ``show --json`` and ``status --json``, from the same functions.
"""

from __future__ import annotations

from typing import Any

from slurmtrain.ops.query.select import Question
from slurmtrain.ops.shared.find import choose_all, is_pattern
from slurmtrain.ops.shared.observe import Observed
from slurmtrain.ops.shared.views import SCHEMA, now_iso
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.version import __version__

Facts = dict[str, Any]


def find_facts(workspace: Workspace, observed: Observed, question: Question) -> Facts:
    """The facts of the page that a user means.

    Args:
        workspace: Where the runs are.
        observed: The state of all runs.
        question: What the user asks: one name without conditions means a run or a sweep.

    Raises:
        RunNotFound: A name refers to no run.
        QueryError: A condition means nothing.
        UserError: There is no run to show.
    """
    if len(question.names) == 1 and not question.has_conditions and not is_pattern(question.names[0]):
        ids = choose_all(workspace, observed.runs, question.names)
        sweeps = {listed.sweep for listed in observed.runs.fetch(ids).values()}
        if len(ids) == 1:
            from slurmtrain.plugins.report.run_facts import run_facts

            return run_facts(workspace, observed, ids[0])
        if len(sweeps) == 1 and (sweep := sweeps.pop()) is not None:
            from slurmtrain.plugins.report.sweep_facts import sweep_facts

            return sweep_facts(workspace, observed, sweep)
    from slurmtrain.plugins.report.many_facts import many_facts

    return many_facts(workspace, observed, question)


def begin_facts(kind: str, id_: str, title: str) -> Facts:
    """What the facts of every page begin with.

    Args:
        kind: ``run``, ``sweep``, ``compare``, ``many`` or ``scale``.
        id_: A name for a file.
        title: What the page is called.
    """
    return {"schema": SCHEMA, "kind": kind, "id": id_, "title": title, "as_of": now_iso(), "version": __version__}
