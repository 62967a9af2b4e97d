"""Which runs roots have a name that the files of a job cannot have."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmtrain.model.run.root import unusable_in_root


@pytest.mark.parametrize(
    ("path", "slurm", "local"),
    [
        ("/runs", "", ""),
        ('/it\'s "odd" $HOME `x` ünï;&[1]*?#:,=', "", ""),
        ("/a%jb", "'%'", "'%j'"),
        ("/a%Ab", "'%'", "'%A'"),
        ("/100%", "'%'", ""),
        ("/a%%b", "'%'", ""),
        ("/a\\b", r"'\\'", ""),
        ("/a\nb", r"'\n'", ""),
        ("/a\x1bb", r"'\x1b'", ""),
    ],
)
def test_a_character_with_a_meaning_in_the_paths_of_logs_is_named(path: str, slurm: str, local: str) -> None:
    for executor, refused in (("slurm", slurm), ("local", local)):
        problem = unusable_in_root(Path(path), executor)
        assert (problem is not None) == bool(refused)
        assert problem is None or f"{refused} in its path" in problem
