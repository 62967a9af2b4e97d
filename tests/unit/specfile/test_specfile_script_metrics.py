"""Mistakes in tracking.metrics, each with its line."""

from __future__ import annotations

import pytest
from helpers.specfiles import Load, Mistakes, only_run

from slurmtrain.model.spec.plan import Plan

BEGIN = "command: python x.py\ntracking:\n  metrics:\n"


@pytest.mark.parametrize(
    ("lines", "line", "expected"),
    [
        ("    pattern: 'loss=(?P<loss'", 4, "is not a regular expression: missing >"),
        (r"    pattern: 'loss=(\S+)'", 4, "it names no metric and no step: give each a named group"),
        (r"    pattern: 'of (?P<total>\d+)'", 4, "it names no metric and no step"),
        ("    pattern: '(?P<a>.)'\n    step: '('", 5, "is not a regular expression: missing )"),
        (
            r"    pattern: '(?P<a>.)'" + "\n" + r"    step: 'step \d+'",
            5,
            "expected one group, the number of finished steps",
        ),
        ("    pattern: '(?P<a>.)(?P<step>.)'\n    step: '(.)'", 5, "'pattern' has a group 'step' already"),
        ("    pattern: '(?P<a>.)'\n    file: m.csv", 5, "'file' and 'pattern' exclude each other"),
        ("    file: metrics.txt", 4, "expected a file that ends in .csv, .tsv, .jsonl, .ndjson"),
        ("    step: iter", 3, "set 'pattern', such as"),
        ("    file: m.csv\n    steps: iter", 5, "unknown key; did you mean 'step'?"),
        ("    file: m.csv\n    total: 0", 5, "expected a whole number of at least 1, found 0"),
    ],
)
def test_a_mistake_is_told_with_its_line(mistakes: Mistakes, lines: str, line: int, expected: str) -> None:
    [(where, _, message)] = mistakes(BEGIN + lines + "\n")
    assert where == str(line)
    assert expected in message


def test_a_pattern_is_kept_as_it_is_and_the_total_may_be_a_param(load: Load) -> None:
    pattern = r"^loss=(?P<loss>\S+)$"
    plan = only_run(load(f"{BEGIN}    pattern: '{pattern}'\n    total: ${{params.steps}}\nparams: {{steps: 7}}\n")).plan
    metrics = plan.spec.tracking.metrics
    assert metrics is not None
    assert (metrics.pattern, metrics.total) == (pattern, 7)
    assert Plan.from_json(plan.to_json()).spec.tracking == plan.spec.tracking
