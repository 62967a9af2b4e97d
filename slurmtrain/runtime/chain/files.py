"""The files of a run that say after which runs it starts, and which start after it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from slurmtrain.errors import PathError
from slurmtrain.model.run.chain.upstreams import Upstream
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.root import run_ids_among
from slurmtrain.system.files import FILE_MODE, make_new_directory, read_json, write_json

_SEEN_S = 20.0
_POLL_S = 0.2


def read_upstreams(run: RunDir) -> list[Upstream]:
    """The runs that this one starts after. Raises PathError."""
    data = read_json(run.upstreams)
    if data is None:
        return []
    try:
        return [Upstream.from_dict(each) for each in data["upstreams"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise PathError(f"{run.upstreams} is not what slurmtrain wrote there ({error!r})") from error


def write_upstreams(run: RunDir, upstreams: Sequence[Upstream]) -> None:
    """Record, in a run that nobody can see yet, which runs it starts after. Raises OSError."""
    write_json(run.upstreams, {"upstreams": [upstream.to_dict() for upstream in upstreams]})


def note_dependent(upstream: RunDir, run_id: str) -> None:
    """Note that a run starts after ``upstream``, unless that was deleted meanwhile. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        try:
            make_new_directory(upstream.dependents)
        except FileNotFoundError:
            return
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
    os.close(os.open(upstream.dependents / run_id, flags, FILE_MODE))


def dependents_of(run: RunDir) -> list[str]:
    """The ids of the runs that start after this one, oldest first; some may never have been created."""
    with contextlib.suppress(OSError):
        return sorted(run_ids_among(os.listdir(run.dependents)))
    return []


def has_begun(run: RunDir) -> bool:
    """Whether all upstreams of a run had ended as they must when it began: it never waits for them again."""
    return run.upstream_facts.exists()


def write_facts(run: RunDir, facts: Mapping[str, Any]) -> None:
    """Record that the upstreams of a run have ended, and what its references stand for. Raises OSError."""
    write_json(run.upstream_facts, {"facts": dict(facts)})


def read_facts(run: RunDir) -> Mapping[str, Any]:
    """What the references of a run stand for, which its node 0 has written; empty without upstreams.

    Raises PathError if this node cannot see them.
    """
    if not run.upstreams.exists():
        return {}
    # Other nodes see a file of node 0's a moment later on some file systems.
    deadline = time.monotonic() + _SEEN_S
    while (data := read_json(run.upstream_facts)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    facts = (data or {}).get("facts")
    if not isinstance(facts, Mapping):
        raise PathError(f"{run.upstream_facts} is not there, or not what slurmtrain wrote there")
    return facts
