"""Removing secrets from lines of logs before they are journaled or shown. Pure."""

from __future__ import annotations

import re

_SECRET = re.compile(
    r"(?i)\b([\w.-]*(?:token|key|password|passwd|secret|credential)s?[\"']?\s*[=:]\s*[\"']?)[^\s\"',;]+"
)


def redact(line: str) -> str:
    """The line with the values of names such as token, key, password or secret replaced."""
    return _SECRET.sub(r"\1<redacted>", line)
