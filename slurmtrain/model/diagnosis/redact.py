"""Removing secrets from lines of logs and of code before they are journaled or shown. Pure."""

from __future__ import annotations

import re

from slurmtrain.model.urls import without_url_passwords

_SECRET = re.compile(
    r"(?i)\b([\w.-]*(?:token|key|password|passwd|secret|credential)s?[\"']?\s*[=:]\s*[\"']?)[^\s\"',;]+"
)
# Text that is assigned to such a name; "key" alone is too common in code. And what tokens of widespread services look
# like: Hugging Face, GitHub, AWS, Weights & Biases.
_SECRET_TEXT = re.compile(
    r"(?i)([\w.-]*(?:token|api_?key|access_?key|password|passwd|secret|credential)s?[\"']?\]?\s*[=:]\s*)([\"'])[^\"']{4,}\2"
)
_SECRET_SETTING = re.compile(
    r"(?i)^([-+ ]\s*(?:export\s+)?\w*(?:token|key|password|passwd|secret|credential)\s*[=:]\s*)[^\s\"'$({]{4,}$"
)
_TOKENS = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bA(?:KIA|SIA)[A-Z0-9]{16}\b|\b[0-9a-f]{40}\b"
)


def redact_code(line: str) -> str:
    """A line of a difference between two versions of code, without texts that look like secrets."""
    line = _SECRET_TEXT.sub(r"\1\2<redacted>\2", line)
    return without_url_passwords(_TOKENS.sub("<redacted>", _SECRET_SETTING.sub(r"\1<redacted>", line)))


def redact(line: str) -> str:
    """The line with the values of names such as token, key, password or secret, and passwords in URLs, replaced."""
    return _SECRET.sub(r"\1<redacted>", without_url_passwords(line))
