"""What is taken out of lines of logs."""

from __future__ import annotations

import pytest

from slurmtrain.model.diagnosis.redact import redact, redact_code


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


@pytest.mark.parametrize(
    ("line", "safe"),
    [
        ('+API_TOKEN = "abcdefgh"', '+API_TOKEN = "<redacted>"'),
        ("-  password: hunter2222", "-  password: <redacted>"),
        ('+login("hf_abcdefghijklmnopqrstuvwxyz")', '+login("<redacted>")'),
        ("+names = sorted(names, key=len)", "+names = sorted(names, key=len)"),
        ('+token = load("tokens.json")', '+token = load("tokens.json")'),
    ],
)
def test_a_changed_line_of_code_loses_its_secrets_alone(line: str, safe: str) -> None:
    assert redact_code(line) == safe
