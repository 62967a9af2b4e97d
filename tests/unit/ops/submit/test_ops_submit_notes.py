"""Notes on what may go wrong with new runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmtrain.ops.submit import notes
from slurmtrain.system.locking.mounts import Mount


@pytest.mark.parametrize(
    ("root", "kind", "place"),
    [
        ("/tmp", "ext4", "/tmp"),
        ("/", "tmpfs", "/mnt"),
        ("/", "ext4", None),
        ("/", "nfs4", None),
    ],
)
def test_a_runs_root_on_the_machines_own_file_system_is_noted(
    root: str, kind: str, place: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notes, "mount_of", lambda _: Mount("/mnt", kind, "disk", frozenset()))
    noted = notes._not_shared(Path(root))
    assert [place in note for note in noted] == ([True] if place else []), noted
