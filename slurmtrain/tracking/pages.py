"""Addresses of MLflow's pages.

The part after ``#`` chooses the page. In MLflow 3 the page of an experiment without ``/runs`` is an overview of traces,
and ``workflowType`` chooses between two menus at its side, the other one for language models; ``model-metrics`` is the
page of a run with its curves, and ``compareRunsMode`` shows the curves of runs beside their list (seen in a browser,
with MLflow 3.17). Versions that know no such parameter ignore it.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote, urlsplit, urlunsplit

_MENU = "workflowType=machine_learning"
_CHART = "compareRunsMode=CHART"
# With more, an address would get longer than browsers and terminals take.
_FILTERED = 50


def run_page(experiment: str, run: str) -> str:
    """The page of a run with its curves.

    Args:
        experiment: The id of its experiment.
        run: Its id in MLflow.
    """
    return f"#/experiments/{quote(experiment)}/runs/{quote(run)}/model-metrics?{_MENU}"


def runs_page(experiment: str, runs: Sequence[str] = ()) -> str:
    """The list of an experiment's runs, with their curves.

    Args:
        experiment: The id of the experiment.
        runs: The MLflow ids of the runs to show, unless there are too many for an address; by default all runs.
    """
    page = f"#/experiments/{quote(experiment)}/runs?{_MENU}&{_CHART}"
    if not 0 < len(runs) <= _FILTERED:
        return page
    condition = f"attributes.run_id IN ({', '.join(repr(run) for run in runs)})"
    return f"{page}&searchFilter={quote(condition)}"


def address(server: str, page: str) -> str:
    """The address of a page, for a browser.

    Args:
        server: The URI of the MLflow server. A name and password in it are left out: addresses are printed.
        page: The page on it.
    """
    parts = urlsplit(server)
    place = parts._replace(netloc=parts.netloc.rpartition("@")[2], path=parts.path.rstrip("/"), query="", fragment="")
    return f"{urlunsplit(place)}/{page}"
