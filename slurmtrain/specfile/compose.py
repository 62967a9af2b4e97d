"""A spec that extends others: ``extends: [base.yaml, more.yaml]``, relative to the file that says so.

The files are merged in order, the extending one last: mappings merge key by key, anything else replaces the value that
was there, and null takes a key away that another file has. Each key remembers its file and line. Like an override, a
value such as ``checkpoint.every`` or a swept key's is replaced as a whole.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurmtrain.errors import Mistake, PathError, SpecError
from slurmtrain.model.spec.kinds import Entries, Section, suggestion
from slurmtrain.specfile.overrides import SCHEMA
from slurmtrain.system.files import describe_os_error
from slurmtrain.system.inherited import expand_home
from slurmtrain.system.owned_files import follow_links, open_regular
from slurmtrain.system.yaml_file import YamlDocument, decode, parse_yaml, write_yaml

KeyPath = tuple[str, ...]
KEY = "extends"
_DEEPEST = 10
_MOST_FILES = 100


@dataclass(frozen=True, slots=True)
class Composition:
    """A spec with all that it extends.

    ``text``: the YAML of the whole, which needs no other file. ``bases``: the files that it extends.
    """

    document: YamlDocument
    text: str
    bases: tuple[Path, ...] = ()


def compose(text: str, name: str, folder: Path, file: Path | None = None) -> Composition:
    """Read the text of a spec, and the files that it extends.

    Args:
        text: The text.
        name: What messages call the spec.
        folder: What its ``extends`` is relative to.
        file: The spec's file, which its bases must not extend; None: there is none.

    Raises:
        SpecError: The text or a base is not a YAML mapping, or a base cannot be read.
    """
    document = parse_yaml(text, name)
    if KEY not in document.data:
        return Composition(document, text)
    layers = _Layers()
    layers.add(document, folder, (os.path.realpath(file),) if file else ())
    if layers.mistakes:
        raise SpecError(layers.mistakes)
    merged = merge(layers.documents)
    sources = "".join(f"# composed of {_on_a_line(each.name)}\n" for each in layers.documents)
    return Composition(merged, sources + write_yaml(merged.data), tuple(layers.bases))


class _Layers:
    """The documents of a spec, in the order of merging."""

    def __init__(self) -> None:
        self.documents: list[YamlDocument] = []
        self.bases: list[Path] = []
        self.mistakes: list[Mistake] = []

    def add(self, document: YamlDocument, folder: Path, chain: Sequence[str]) -> None:
        """Add what a document extends, then the document itself; ``chain``: the files that led here, resolved."""
        for index, name in enumerate(self._names(document)):
            where = f"{document.name}:{document.line_of((KEY, str(index)))}"
            try:
                self._add_base(folder / expand_home(name), name, chain)
            except (PathError, ValueError) as error:
                self.mistakes.append(Mistake(where, KEY, str(error)))
        self.documents.append(replace(document, data={key: v for key, v in document.data.items() if key != KEY}))

    def _names(self, document: YamlDocument) -> list[str]:
        names = document.data.get(KEY)
        if names is None:
            return []
        listed = names if isinstance(names, list) else [names]
        if not all(isinstance(name, str) and name.strip() and "\0" not in name for name in listed):
            why = f"expected the path of a YAML file, or a list of such, found {names!r}"
            self.mistakes.append(Mistake(f"{document.name}:{document.line_of((KEY,))}", KEY, why))
            return []
        return listed

    def _add_base(self, path: Path, name: str, chain: Sequence[str]) -> None:
        """Add a base and all that it extends. Raises PathError, and ValueError with why it cannot be extended."""
        resolved = os.path.realpath(path)
        if resolved in chain:
            files = " -> ".join(Path(each).name for each in (*chain[chain.index(resolved) :], resolved))
            raise ValueError(f"{name} extends itself: {files}")
        if len(chain) > _DEEPEST:
            raise ValueError(f"files extend each other more than {_DEEPEST} levels deep")
        if len(self.documents) >= _MOST_FILES:
            raise ValueError(f"a spec may consist of at most {_MOST_FILES} files")
        try:
            document = parse_yaml(_read(path, name), str(path))
        except SpecError as error:
            # It names the base, and its line.
            self.mistakes += error.mistakes
            return
        self.bases.append(path)
        self.add(document, path.parent, (*chain, resolved))


def _read(path: Path, name: str) -> str:
    try:
        with os.fdopen(open_regular(follow_links(path)), "rb") as file:
            return decode(file.read(), path)
    except (FileNotFoundError, NotADirectoryError):
        near = suggestion(path.name, [each.name for each in path.parent.glob("*.y*ml")])
        raise PathError(f"there is no {name} ({path}){near}") from None
    except OSError as error:
        raise PathError(f"{path} cannot be read: {describe_os_error(error)}") from error


def merge(documents: Sequence[YamlDocument]) -> YamlDocument:
    """The documents as one, later ones over earlier ones. It has the name of the last, and knows whose each key is."""
    last = documents[-1]
    merged = YamlDocument(last.name, {}, mistakes=[mistake for each in documents for mistake in each.mistakes])
    for document in documents:
        _overlay(merged, merged.data, document, document.data, ())
    for path in [path for path in merged.lines if _is_taken_away(path, merged.data, documents)]:
        *parents, key = path
        del _value(merged.data, parents)[key]
    return merged


def _overlay(
    merged: YamlDocument, low: dict[str, Any], document: YamlDocument, high: Mapping[str, Any], at: KeyPath
) -> None:
    for key, value in high.items():
        path = (*at, key)
        if isinstance(value, dict) and isinstance(low.get(key), dict) and _merges(path):
            _note_place(merged, document, path)
            _overlay(merged, low[key], document, value, path)
            continue
        for below in _below(path, merged.lines, low.get(key)):
            del merged.lines[below], merged.files[below]
        low[key] = _copy(value)
        for below in _below(path, document.lines, value):
            _note_place(merged, document, below)


def _below(path: KeyPath, lines: Mapping[KeyPath, int], value: Any) -> list[KeyPath]:
    """A key and the keys inside its value, as far as they have lines."""
    if isinstance(value, dict | list):
        return [each for each in lines if each[: len(path)] == path]
    return [path] if path in lines else []


def _note_place(merged: YamlDocument, document: YamlDocument, path: KeyPath) -> None:
    merged.lines[path] = document.lines[path]
    merged.files[path] = document.name


def _merges(path: KeyPath) -> bool:
    """Whether two mappings under this key become one, rather than the later one replacing the other."""
    if path[0] == "sweep":
        return len(path) == 1
    for length in range(1, len(path) + 1):
        kind = SCHEMA.get(path[:length])
        if isinstance(kind, Entries):
            return True
        if kind is not None and not isinstance(kind, Section):
            return False
    return True


def _copy(value: Any) -> Any:
    """A copy whose mappings can be merged into, and that shares nothing with the original."""
    return {key: _copy(each) for key, each in value.items()} if isinstance(value, dict) else value


def _is_taken_away(path: KeyPath, data: Any, documents: Sequence[YamlDocument]) -> bool:
    """Whether a key is null in the end, and another document has a value for it."""
    missing = object()
    return _value(data, path) is None and any(
        _value(each.data, path, missing) not in (None, missing) for each in documents
    )


def _value(data: Any, path: Sequence[str], default: Any = None) -> Any:
    for key in path:
        if not isinstance(data, dict) or key not in data:
            return default
        data = data[key]
    return data


def _on_a_line(name: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in name)
