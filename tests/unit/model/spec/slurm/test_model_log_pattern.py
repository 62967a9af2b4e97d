"""The key ``log``: which patterns a spec may have, and what they stand for."""

from __future__ import annotations

import re

import pytest

from slurmtrain.model.spec.sbatch import check_log, fill_log

FACTS = {"x": "digits", "j": "123", "A": "120", "a": "3", "u": "ann", "N": "n0", "n": "0", "t": "0"}


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("logs/%x-%j.out", "logs/digits-123.out"),
        ("/scratch/%u/%A_%a.log", "/scratch/ann/120_3.log"),
        ("%N-%5j-%%j.%n%t", "n0-00123-%j.00"),
    ],
)
def test_a_pattern_stands_for_the_path_that_sbatch_would_write(pattern: str, path: str) -> None:
    check_log(pattern)
    assert fill_log(pattern, FACTS) == path


@pytest.mark.parametrize(
    ("pattern", "message", "proposal"),
    [
        ("train.log", "since it lacks the job's id; write train-%j.log", "train-%j.log"),
        ("logs.d/out", "write logs.d/out-%j", "logs.d/out-%j"),
        ("%x-%A.out", "write %x-%A-%j.out", "%x-%A-%j.out"),
        ("%j-%s.out", "%s stands for nothing here", "%j.out"),
        ("%j.out%", "% stands for nothing here", "%j.out%%"),
        ("%j/", "expected the path of a file, such as logs/%x-%j.out", "logs/%x-%j.out"),
        ("a\\%j", "leave the backslash out", "a%j"),
        ("a\n%j", "control character", "a%j"),
    ],
)
def test_what_cannot_be_expressed_is_refused_with_what_can(pattern: str, message: str, proposal: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_log(pattern)
    check_log(proposal)
