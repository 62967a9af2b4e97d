"""What is taken out of lines of logs."""

from __future__ import annotations

import pytest

from slurmtrain.model.diagnosis.redact import redact


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("API_TOKEN=hunter2 ok", "API_TOKEN=<redacted> ok"),
        ("password: hunter2", "password: <redacted>"),
        ('{"api_key": "hunter2", "a": 1}', '{"api_key": "<redacted>", "a": 1}'),
        ("--secret=hunter2", "--secret=<redacted>"),
        ("Credentials = hunter2;x", "Credentials = <redacted>;x"),
        ("a token of thanks", "a token of thanks"),
        ("KeyError: 'x'", "KeyError: 'x'"),
    ],
)
def test_the_value_of_a_secret_name_is_replaced(line: str, shown: str) -> None:
    assert redact(line) == shown
