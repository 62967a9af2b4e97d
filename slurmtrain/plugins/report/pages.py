"""A page of its own: facts, a frame, scripts and styles in one HTML file that asks the network for nothing.

Facts are JSON within the page. All have ``kind``, ``id``, ``title``, ``as_of`` and ``version``; the rest is up to the
kind, with the figures of ``show --json`` and ``status --json``, from the same functions. Scripts draw them, and put
every text of users and jobs into the page as text. The policy in the page's head permits only its own scripts, by their
hashes: whatever a name or a log contains, nothing else is executed, and nothing is loaded or sent.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from slurmtrain.errors import UserError
from slurmtrain.ops.shared.views import SCHEMA, now_iso
from slurmtrain.system.files import describe_os_error, write_atomically
from slurmtrain.version import __version__

Facts = dict[str, Any]

# The scripts of a page besides the frame's, by its kind.
SCRIPTS: Mapping[str, Sequence[str]] = {
    "run": ("run.js",),
    "sweep": ("runs.js", "sweep.js"),
    "compare": ("runs.js", "sweep.js"),
    "many": ("runs.js", "many.js"),
    "scale": ("scale.js",),
}
_LIBRARIES = {"d3.min.js": "d3.LICENSE", "plot.min.js": "plot.LICENSE"}
# What would end or open an element, and two line ends that JavaScript once did not know.
_ESCAPES = {ord(each): f"\\u{ord(each):04x}" for each in "<>&\u2028\u2029"}


def begin_facts(kind: str, id_: str, title: str) -> Facts:
    """What the facts of every page begin with.

    Args:
        kind: ``run``, ``sweep``, ``compare``, ``many`` or ``scale``.
        id_: A name for a file.
        title: What the page is called.
    """
    return {"schema": SCHEMA, "kind": kind, "id": id_, "title": title, "as_of": now_iso(), "version": __version__}


def build_page(facts: Mapping[str, Any], *, source: str = "", links: str = "", scripts: Sequence[str] = ()) -> str:
    """A page as HTML.

    Args:
        facts: The content; its ``kind`` says which page it is, its ``title`` what the page is called.
        source: Where the page fetches its facts, instead of having them: an address on the server that it is from;
            ``facts`` then needs no more than the kind and the title.
        links: The beginning of the addresses of pages of runs and sweeps, whose ids follow; empty: there are none.
        scripts: Further assets to execute behind the page's own.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    names = [*_LIBRARIES, "page.js", *SCRIPTS[facts["kind"]], *scripts]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(asset("page.html.j2")).render(
        title=facts["title"],
        version=__version__,
        policy=_policy(names, source),
        style=Markup(asset("page.css")),  # noqa: S704 (our own)
        source=source,
        links=links,
        facts=Markup(facts_text(facts)),  # noqa: S704 (escaped as JSON)
        scripts=[Markup(asset(name)) for name in names],  # noqa: S704 (our own)
    )


def write_page(facts: Mapping[str, Any], target: str | Path | None = None) -> Path:
    """Write a page to a file that its owner alone can read; returns its path.

    Args:
        facts: The content of the page.
        target: The file; None: one in the current directory that is named for what the page shows.

    Raises:
        UserError: It cannot be written.
    """
    path = Path(target or f"report-{facts['id']}.html")
    try:
        write_atomically(path, build_page(facts).encode(), private=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {describe_os_error(error)}; name another file") from error
    return path


def facts_text(facts: Mapping[str, Any]) -> str:
    """Facts as JSON that can stand within HTML; numbers that JSON has not are null."""
    return json.dumps(_jsonable(facts), separators=(",", ":"), allow_nan=False).translate(_ESCAPES)


@cache
def asset(name: str) -> str:
    """The text of a file in ``assets/``; a library's begins with its licence."""
    folder = resources.files(__package__) / "assets"
    text = (folder / name).read_text(encoding="utf-8")
    if name in _LIBRARIES:
        text = f"/*\n{(folder / _LIBRARIES[name]).read_text(encoding='utf-8')}*/\n{text}"
    return text


def _policy(names: Sequence[str], source: str) -> str:
    """The Content-Security-Policy of a page with these scripts."""
    hashes = [base64.b64encode(hashlib.sha256(asset(name).encode()).digest()).decode() for name in names]
    parts = [
        "default-src 'none'",
        "script-src " + " ".join(f"'sha256-{each}'" for each in hashes),
        # Plot puts a style into each chart.
        "style-src 'unsafe-inline'",
        "img-src data:",
        "connect-src 'self'" if source else "connect-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
    return "; ".join(parts)


def _jsonable(value: Any) -> Any:
    """A value without numbers that JSON has not."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _jsonable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(each) for each in value]
    return value
