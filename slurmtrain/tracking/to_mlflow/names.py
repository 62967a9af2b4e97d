"""Names under which MLflow stores metrics and params.

MLflow accepts letters, digits, and ``_-. :/``, at most 250 characters, and only paths in their shortest form, since it
may store each name as a file: ``train//loss`` is refused, and ``a/../b`` (``mlflow.utils.validation``). Such a name is
changed to one that is accepted, and marked with a hash of itself: the same name always gets the same other one, and no
two names get the same.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Iterable

_LONGEST = 250
_ILLEGAL = re.compile(r"[^\w\-. :/]")
_DIGITS = 12
# A name that ends like this is changed as well: otherwise it could be the one that another name is changed to.
_MARK = re.compile(rf"-[0-9a-f]{{{_DIGITS}}}\Z")


def legal_name(name: str) -> str:
    """The name under which MLflow stores what is called ``name``; the same name if MLflow accepts it."""
    if name and len(name) <= _LONGEST and not _ILLEGAL.search(name) and _is_shortest(name) and not _MARK.search(name):
        return name
    parts = [part for part in _ILLEGAL.sub("_", name).split("/") if part not in ("", ".", "..")]
    return _marked("/".join(parts), name)


def flat_name(name: str) -> str:
    """Another such name, without slashes: where each name is a file, ``a`` and ``a/b`` exclude each other."""
    return _marked(_ILLEGAL.sub("_", name).replace("/", "_"), name)


def is_in_the_way(name: str, others: Iterable[str]) -> bool:
    """Whether ``name`` and any of the ``others`` cannot both be files: one would be the directory of the other."""
    return any(name.startswith(f"{other}/") or other.startswith(f"{name}/") for other in others)


def _is_shortest(name: str) -> bool:
    return posixpath.normpath(name) == name and name != "." and not name.startswith(("..", "/"))


def _marked(text: str, name: str) -> str:
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:_DIGITS]
    # MLflow refuses all names that begin with "..", even "..a".
    return f"{text.lstrip('.')[: _LONGEST - _DIGITS - 1]}-{digest}"
