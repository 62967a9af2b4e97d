"""Names that W&B does not take as they are: another one for each, marked with a hash of the name.

W&B refuses some characters in the name of a project, and takes dashes off the ends of a param's name, so that ``-lr``
and ``lr`` would be one (``wandb_config.py``). The same name always gets the same other one, and no two get the same.
"""

from __future__ import annotations

import hashlib
import re

# W&B's own columns of a history begin with it.
_RESERVED = "_"
_LONGEST_PROJECT = 128
_ILLEGAL = re.compile(r"[/\\#?%:]")
_OWN_PARAM = "_wandb"
_DIGITS = 12
# A name that ends like this is changed as well: otherwise it could be the one that another name is changed to.
_MARK = re.compile(rf"-[0-9a-f]{{{_DIGITS}}}\Z")


def project_name(name: str) -> str:
    """The name of W&B's project for what is called ``name``; the same if W&B takes it."""
    if len(name) <= _LONGEST_PROJECT and not _ILLEGAL.search(name) and not _MARK.search(name):
        return name
    return _marked(_ILLEGAL.sub("-", name)[: _LONGEST_PROJECT - _DIGITS - 1], name)


def param_name(name: str) -> str:
    """The name under which W&B has the param ``name`` in a run's config; the same if W&B takes it."""
    if name == name.strip("-") and name != _OWN_PARAM and not _MARK.search(name):
        return name
    return _marked(name.strip("-"), name)


def refusal(name: str) -> str:
    """Why W&B does not take a metric of this ``name``; empty if it does. Others are stored as they are called."""
    if name.startswith(_RESERVED):
        return "names that begin with '_' are W&B's own"
    return "" if name else "a metric without a name is none to W&B"


def _marked(text: str, name: str) -> str:
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:_DIGITS]
    return f"{text or '_'}-{digest}"
