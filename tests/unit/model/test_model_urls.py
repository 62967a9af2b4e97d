"""Passwords in URLs."""

from __future__ import annotations

import pytest

from slurmtrain.model.urls import check_tracking_uri, has_url_password, redact, redact_code, without_url_passwords


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://ann:hunter2@h:5000/x", "http://ann:<redacted>@h:5000/x"),
        ("http://:hunter2@h", "http://:<redacted>@h"),
        ("postgresql+psycopg://ann:hun@ter2@h/db", "postgresql+psycopg://ann:<redacted>@h/db"),
        ("postgresql://ann:hun/ter2@h/db", "postgresql://ann:<redacted>@h/db"),
        ("postgresql://ann:8080x@h/db", "postgresql://ann:<redacted>@h/db"),
        ("postgresql://ann:1234@h/db", "postgresql://ann:<redacted>@h/db"),
        ("postgresql://h/db?user=ann&password=hunter2&a=b", "postgresql://h/db?user=ann&password=<redacted>&a=b"),
        ("x='http://a:b@h' y=\"http://c:d@h\"", "x='http://a:<redacted>@h' y=\"http://c:<redacted>@h\""),
    ],
)
def test_a_password_in_a_url_is_seen_and_replaced(text: str, shown: str) -> None:
    assert has_url_password(text)
    assert without_url_passwords(text) == shown
    assert not has_url_password(shown)


@pytest.mark.parametrize(
    "text",
    [
        "http://h:5000/a@b", "http://h:5000", "http://[::1]:5000/a@b", "git+https://ann@h/x@main",
        "http://h:5000, or mail to a@b", "postgresql://ann:$PGPASSWORD@h/db", "ann:hunter2@h", "s3://bucket/run:12/x",
        "http://h/?page=2&token_count=3",
    ],
)  # fmt: skip
def test_other_texts_have_none(text: str) -> None:
    assert not has_url_password(text)
    assert without_url_passwords(text) == text


@pytest.mark.parametrize(
    ("uri", "cure"),
    [
        ("http://ann:hunter2@h", "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
        ("https://hunter2@h", "or MLFLOW_TRACKING_TOKEN"),
        ("postgresql+psycopg://ann:hunter2@h/db", r"~/\.pgpass"),
        ("postgresql://ann@h/db?password=hunter2", r"~/\.pgpass"),
        ("mysql+pymysql://ann:hunter2@h/db", r"read_default_file=/home/user/\.my\.cnf"),
        ("mssql+pyodbc://ann:hunter2@h/db", "let the driver of the database take the password from a file"),
    ],
)
def test_a_tracking_uri_with_a_password_is_refused_with_what_to_write_instead(uri: str, cure: str) -> None:
    with pytest.raises(ValueError, match=cure) as refusal:
        check_tracking_uri(uri)
    assert "hunter2" not in str(refusal.value)


def test_a_very_long_word_is_read_only_once() -> None:
    # If each of its letters were tried as the first one of a scheme, this would take minutes.
    word = "x" * 1_000_000
    assert without_url_passwords(f"{word} http://ann:hunter2@h") == f"{word} http://ann:<redacted>@h"


@pytest.mark.parametrize("part", ["://x", "://h/?a=b", "://?&token", "&", "://u:"])
def test_many_urls_in_one_word_are_read_in_no_time(part: str) -> None:
    text = f"http://h/{part * 100_000}"
    assert (
        without_url_passwords(f"{text}?password=hunter2&token=hunter3")
        == f"{text}?password=<redacted>&token=<redacted>"
    )


# --- what is taken out of lines of logs ---------------------------------------------------------------------------


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
