"""Passwords inside of URLs, wherever these stand: they are recorded and printed nowhere."""

from __future__ import annotations

import re

HIDDEN = "<redacted>"
# Text up to the last @ before a slash, or else up to the next @: whoever writes a password with a slash into a URL has
# forgotten to encode it. Neither a port with an @ after it nor a variable of a shell is a password. A scheme is sought
# only where a word begins, so that a long word is read once.
_IN_ACCOUNT = re.compile(
    r"(?P<before>(?<![A-Za-z0-9+.-])[A-Za-z0-9+.-]+://[^\s/@:?#\[\"'`]*:)(?!\d*[/?#]|\$|<redacted>)"
    r"(?:[^\s/?#\"'`]+|[^\s@\"'`]+)(?=@)"
)
_IN_QUERY = re.compile(
    r"(?P<before>://[^\s\"'`]*[?&]\w*(?:passw(?:or)?d|pwd|secret|token)=)(?!\$|<redacted>)[^\s&\"'`#]+", re.IGNORECASE
)
_OF_SERVER = (
    "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, or write MLflow's own file "
    "~/.mlflow/credentials (chmod 600)"
)
_USER = re.compile(r"https?://[^\s/@?#\"'`]+@")


def has_url_password(text: str) -> bool:
    """Whether a text has a URL with a password in it, rather than with a variable that has one."""
    return any(pattern.search(text) for pattern in (_IN_ACCOUNT, _IN_QUERY))


def without_url_passwords(text: str) -> str:
    """A text with the passwords of its URLs replaced."""
    return _IN_QUERY.sub(rf"\g<before>{HIDDEN}", _IN_ACCOUNT.sub(rf"\g<before>{HIDDEN}", text))


def check_tracking_uri(uri: str) -> None:
    """Raise ValueError, with what to write instead, for a tracking URI that holds a password: URIs are recorded."""
    if not has_url_password(uri) and not _USER.match(uri):
        return
    scheme = re.split(r"[:+]", uri)[0]
    cures = {
        "http": _OF_SERVER,
        "https": _OF_SERVER,
        "postgresql": "keep the password in ~/.pgpass (chmod 600), or set PGPASSWORD, and write postgresql://user@host/name",
        "mysql": "keep the password in a file (chmod 600), and name it as in "
        "mysql+pymysql://user@host/name?read_default_file=/home/user/.my.cnf",
    }
    cure = cures.get(scheme, "let the driver of the database take the password from a file or a variable")
    raise ValueError(f"credentials do not belong in a URI that is recorded; {cure}")
