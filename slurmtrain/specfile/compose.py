"""A spec that extends others: ``extends: [base.yaml, more.yaml]``, relative to the file that says so; and a program's.

The files are merged in order, the extending one last: mappings merge key by key, anything else replaces the value that
was there, and null takes a key away that another file has. Like an override, a value such as ``checkpoint.every`` or a
swept key's is replaced as a whole. What a program has built becomes the YAML that a person would have written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from slurmtrain.errors import Mistake, PathError, SpecError
from slurmtrain.model.experiment.kinds import Entries, KeyPath, Section, suggestion
from slurmtrain.specfile.overrides import SCHEMA
from slurmtrain.system.files import describe_os_error
from slurmtrain.system.inherited import expand_home
from slurmtrain.system.owned_files import follow_links, open_regular
from slurmtrain.system.yaml_file import YamlDocument, decode_text, parse_yaml, write_yaml

KEY = "extends"
# Beyond these it is surely a mistake. A base that two files extend is read twice, so that few files can become many.
_DEEPEST = 10
_MOST_FILES = 100
# Stands for a value that a later file takes away.
_TAKEN_AWAY = object()


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
    merged = merge_documents(layers.documents)
    # A line break in the name of a file would end the comment.
    names = ("".join(char if char.isprintable() else "?" for char in each.name) for each in layers.documents)
    sources = "".join(f"# composed of {name}\n" for name in names)
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
            where = document.place_of((KEY, str(index)))
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
            why = f"expected the path of a YAML file, or a list of paths, found {names!r}"
            self.mistakes.append(Mistake(document.place_of((KEY,)), KEY, why))
            return []
        return listed

    def _add_base(self, path: Path, name: str, chain: Sequence[str]) -> None:
        """Add a base and all that it extends. Raises PathError, and ValueError with why it cannot be extended."""
        # Without links, so that a file that extends itself is recognised by any of its names.
        resolved = os.path.realpath(path)
        if resolved in chain:
            files = " -> ".join(Path(each).name for each in (*chain[chain.index(resolved) :], resolved))
            raise ValueError(f"{name} extends itself: {files}")
        if len(chain) > _DEEPEST:
            raise ValueError(f"files extend each other more than {_DEEPEST} levels deep")
        if len(self.documents) >= _MOST_FILES:
            raise ValueError(f"a spec may consist of at most {_MOST_FILES} files")
        try:
            with os.fdopen(open_regular(follow_links(path)), "rb") as file:
                document = parse_yaml(decode_text(file.read(), path), str(path))
        except SpecError as error:
            # It names the base, and its line.
            self.mistakes += error.mistakes
            return
        except (FileNotFoundError, NotADirectoryError):
            near = suggestion(path.name, [each.name for each in path.parent.glob("*.y*ml")])
            raise PathError(f"there is no {name} ({path}){near}") from None
        except OSError as error:
            raise PathError(f"{path} cannot be read: {describe_os_error(error)}") from error
        # Its own bases come before it: what extends a file is merged over it.
        self.bases.append(path)
        self.add(document, path.parent, (*chain, resolved))


def merge_documents(documents: Sequence[YamlDocument]) -> YamlDocument:
    """The documents as one, later ones over earlier ones. It has the name of the last, and knows whose each key is."""
    data: dict[str, Any] = {}
    for document in documents:
        _overlay(data, document.data, ())
    mistakes = [mistake for each in documents for mistake in each.mistakes]
    return YamlDocument(documents[-1].name, _without_taken(data), mistakes=mistakes, layers=documents)


def _overlay(low: dict[str, Any], high: Mapping[str, Any], at: KeyPath) -> None:
    for key, value in high.items():
        path, inside = (*at, key), low.get(key)
        # Two mappings become one in sections and below keys with free names; elsewhere the later one is the value.
        kinds = (SCHEMA.get(path[:length]) for length in range(1, len(path) + 1))
        kind = next((each for each in kinds if each is not None and not isinstance(each, Section)), None)
        merges = len(path) == 1 if path[0] == "sweep" else kind is None or isinstance(kind, Entries)
        if merges and isinstance(value, dict) and isinstance(inside, dict):
            _overlay(inside, value, path)
        else:
            low[key] = _TAKEN_AWAY if value is None and inside is not None else _copy(value)


def _without_taken(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without_taken(each) for key, each in value.items() if each is not _TAKEN_AWAY}


def _copy(value: Any) -> Any:
    """A copy whose mappings can be merged into, and that shares nothing with the original."""
    return {key: _copy(each) for key, each in value.items()} if isinstance(value, dict) else value


NAME = "spec"
"""What messages call it, in place of a file's path."""
# As many levels as a file may have.
_DEEPEST_DATA = 60


def spec_as_yaml(data: Mapping[str, Any]) -> str:
    """The YAML of a spec.

    Tuples become lists, paths text, and numbers of other libraries, such as numpy's, plain ones.

    Args:
        data: Its keys and values, nested as in a file.

    Raises:
        SpecError: Lists all values that no spec can hold.
    """
    mistakes: list[Mistake] = []
    plain = _plain_value(data, (), mistakes)
    if mistakes:
        raise SpecError(mistakes)
    return write_yaml(plain)


def write_assignments(values: Mapping[str, Any]) -> list[str]:
    """Overrides such as ``params.lr=0.1`` or, where values are lists, the keys to vary, as on a command line.

    Args:
        values: By key. The key of a new parameter begins with ``+``, as on a command line.

    Raises:
        SpecError: Lists all values that no spec can hold.
    """
    mistakes: list[Mistake] = []
    texts = []
    for key, value in values.items():
        # As JSON, so that no text can be taken for anything else, but for YAML's characters.
        plain = _plain_value(value, (key,), mistakes)
        try:
            text = json.dumps(plain, ensure_ascii=False, allow_nan=False)
        except ValueError:
            mistakes.append(Mistake(NAME, key, "an override cannot be infinite, or NaN"))
        else:
            escaped = "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in text)
            texts.append(f"{key}={escaped}")
    if mistakes:
        raise SpecError(mistakes)
    return texts


def _plain_value(value: Any, at: tuple[str, ...], mistakes: list[Mistake]) -> Any:
    if len(at) > _DEEPEST_DATA:
        mistakes.append(Mistake(NAME, ".".join(at[:2]), f"nested more than {_DEEPEST_DATA} levels deep"))
    elif isinstance(value, Mapping):
        return {str(key): _plain_value(each, (*at, str(key)), mistakes) for key, each in value.items()}
    elif isinstance(value, list | tuple):
        return [_plain_value(each, (*at, str(index)), mistakes) for index, each in enumerate(value)]
    # Before numbers, since True is one to Python.
    elif value is None or isinstance(value, bool):
        return value
    elif isinstance(value, str | os.PathLike):
        return str(os.fspath(value))
    elif isinstance(value, Integral):
        return int(value)
    elif isinstance(value, Real):
        return float(value)
    else:
        expected = "expected text, a number, True, False, None, a list or a mapping"
        why = f"a value of type {type(value).__name__} cannot be in a spec; {expected}"
        mistakes.append(Mistake(NAME, ".".join(at), why))
    return None
