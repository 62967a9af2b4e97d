"""YAML with the line of every key, and with the traps of YAML 1.1 reported instead of sprung."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from yaml.reader import ReaderError

from slurmtrain.errors import Mistake, PlaceError, SpecError
from slurmtrain.system.files import describe_os_error

KeyPath = tuple[str, ...]
SEXAGESIMAL = re.compile(r"[-+]?[1-9][0-9_]*(?::[0-5]?[0-9])+")
_NODES = 100_000
_DEPTH = 60


@dataclass(slots=True)
class Document:
    """A YAML mapping as plain data, with the line and the span of characters of each value."""

    name: str
    data: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)
    spans: dict[KeyPath, tuple[int, int]] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

    def line_of(self, path: KeyPath) -> int:
        """The line of a key, or of the nearest one above it that is written in the file."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return 1


def read_text(path: Path) -> str:
    """The text of a file. Raises PlaceError with a sentence where that cannot be had."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise PlaceError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise PlaceError(f"{path}: this is a directory; name the YAML file in it") from None
    except UnicodeDecodeError as error:
        raise PlaceError(f"{path}: this is no text in UTF-8 (byte {error.start}); is it a YAML file?") from None
    except OSError as error:
        raise PlaceError(f"{path}: cannot be read: {describe_os_error(error)}") from error


def parse_yaml(text: str, name: str) -> Document:
    """Parse a YAML mapping. Raises SpecError for text that is none; lesser mistakes stand in the document."""
    try:
        loader = _loader_class()(text)
        root = loader.get_single_node()
        document = Document(name, {})
        data = _Reader(loader, document).read(root, ()) if isinstance(root, yaml.MappingNode) else {}
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise SpecError([Mistake(f"{name}:{line}", "", f"this is not YAML: {error.reason}")]) from None
    except RecursionError:
        raise SpecError([Mistake(f"{name}:1", "", "this is nested too deeply to be read")]) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        why = " ".join(filter(None, (error.context, error.problem)))
        raise SpecError([Mistake(f"{name}:{mark.line + 1 if mark else 1}", "", f"this is not YAML: {why}")]) from None
    except yaml.YAMLError as error:
        raise SpecError([Mistake(f"{name}:1", "", f"this is not YAML: {' '.join(str(error).split())}")]) from None
    if root is None:
        raise SpecError([Mistake(f"{name}:1", "", "the file is empty; docs/spec.md shows what a spec looks like")])
    if not isinstance(root, yaml.MappingNode):
        raise SpecError(
            [Mistake(f"{name}:{root.start_mark.line + 1}", "", "expected a mapping (key: value) at the top")]
        )
    document.data = data
    return document


def parse_value(raw: str) -> Any:
    """One value of a command line: as in a file, but ``12:00:00`` stays text, since a shell eats quotes.

    Raises ValueError with a sentence.
    """
    try:
        loader = _scalar_loader()(raw)
        node = loader.get_single_node()
        document = Document("", {})
        value = None if node is None else _Reader(loader, document).read(node, ())
    except RecursionError:
        raise ValueError("the value is nested too deeply") from None
    except SpecError as error:
        raise ValueError(error.mistakes[0].message) from None
    except yaml.YAMLError as error:
        raise ValueError(f"the value is not YAML: {' '.join(str(error).split())}") from None
    if document.mistakes:
        raise ValueError(document.mistakes[0].message)
    return value


@cache
def _loader_class() -> type[yaml.SafeLoader]:
    """YAML 1.1 as PyYAML has it, but ``1e-3`` is a number, as YAML 1.2 and everybody has it."""

    class Loader(yaml.SafeLoader):
        """Local to this module."""

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )
    return Loader


@cache
def _scalar_loader() -> type[yaml.SafeLoader]:
    """Without YAML 1.1's sexagesimal numbers."""

    class Loader(_loader_class()):  # type: ignore[misc]
        """Local to this module."""

    Loader.yaml_implicit_resolvers = {
        first: [(tag, _WithoutColon(rule)) for tag, rule in rules]
        for first, rules in Loader.yaml_implicit_resolvers.items()
    }
    return Loader


@dataclass(frozen=True, slots=True)
class _WithoutColon:
    """A resolver's pattern that does not match what holds a colon."""

    pattern: re.Pattern[str]

    def match(self, value: str) -> re.Match[str] | None:
        return None if ":" in value else self.pattern.match(value)


class _Reader:
    """Turns YAML nodes into plain data, noting where everything stands and what is wrong with it."""

    def __init__(self, loader: yaml.SafeLoader, document: Document) -> None:
        self._loader = loader
        self._document = document
        self._nodes = 0

    def read(self, node: yaml.Node, at: KeyPath, above: tuple[int, ...] = ()) -> Any:
        self._nodes += 1
        if len(above) > _DEPTH:
            raise SpecError([Mistake(self._where(node), "", f"nested more than {_DEPTH} levels deep")])
        if id(node) in above:
            self._wrong(node, at, "this alias refers to itself")
            return None
        if self._nodes > _NODES:
            raise SpecError([Mistake(self._where(node), "", f"more than {_NODES} values after aliases are expanded")])
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, at, (*above, id(node)))
        if isinstance(node, yaml.SequenceNode):
            return [self._item(item, (*at, str(i)), (*above, id(node))) for i, item in enumerate(node.value)]
        return self._scalar(node, at)

    def _mapping(self, node: yaml.MappingNode, at: KeyPath, above: tuple[int, ...]) -> dict[str, Any]:
        written: dict[str, int] = {}
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key in written and key != "<<":
                self._wrong(
                    key_node, (*at, str(key)), f"this key stands twice, first on line {written[key]}; keep one of them"
                )
            elif key is not None:
                written[key] = key_node.start_mark.line + 1
        self._loader.flatten_mapping(node)
        data = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._wrong(key_node, at, "a key is a word, not a list or a mapping")
                continue
            path = (*at, key_node.value)
            self._document.lines[path] = key_node.start_mark.line + 1
            self._document.spans[path] = (value_node.start_mark.index, value_node.end_mark.index)
            data[key_node.value] = self.read(value_node, path, above)
        return data

    def _item(self, node: yaml.Node, at: KeyPath, above: tuple[int, ...]) -> Any:
        self._document.lines[at] = node.start_mark.line + 1
        return self.read(node, at, above)

    def _scalar(self, node: yaml.Node, at: KeyPath) -> Any:
        try:
            value = self._loader.construct_object(node)
            if isinstance(value, str):
                value.encode()
        # PyYAML's constructors raise whatever their conversions raise: KeyError for !!bool x, IndexError for !!int ''.
        except (yaml.YAMLError, ValueError, LookupError, OverflowError, AttributeError, TypeError) as error:
            said = " ".join(str(error).split())[:200]
            self._wrong(node, at, f"this value cannot be read: {type(error).__name__}: {said}")
            return None
        plain = isinstance(node, yaml.ScalarNode) and node.style is None
        if plain and isinstance(value, int | float) and SEXAGESIMAL.fullmatch(node.value):
            quoted = f'put it in quotes: "{node.value}"'
            self._wrong(node, at, f"YAML reads an unquoted {node.value} as the number {value}; {quoted}")
            return node.value
        if not (value is None or isinstance(value, bool | int | float | str)):
            self._wrong(node, at, f"YAML reads this as a {type(value).__name__}; put it in quotes")
            return None
        return value

    def _wrong(self, node: yaml.Node, at: KeyPath, message: str) -> None:
        self._document.mistakes.append(Mistake(self._where(node), ".".join(at), message))

    def _where(self, node: yaml.Node) -> str:
        return f"{self._document.name}:{node.start_mark.line + 1}"
