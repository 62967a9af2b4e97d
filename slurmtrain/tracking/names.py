"""Names that a tracker does not take, of metrics, params or projects: they are changed, and marked with a hash.

The same name always gets the same other one, and no two names get the same.
"""

from __future__ import annotations

import hashlib
import re

_DIGITS = 12
_MARK = re.compile(rf"-[0-9a-f]{{{_DIGITS}}}\Z")
MARK_LENGTH = _DIGITS + 1


def is_marked(name: str) -> bool:
    """Whether a name ends like a mark, so that it has to be changed as well: another one may be changed to it."""
    return _MARK.search(name) is not None


def marked(text: str, name: str) -> str:
    """A ``text`` that a tracker takes, marked with a hash of the ``name`` that it stands for."""
    return f"{text}-{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:_DIGITS]}"
