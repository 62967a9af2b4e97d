"""YAML with the line of every key; values that YAML 1.1 reads in a surprising way are reported as mistakes."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.reader import ReaderError

from slurmtrain.errors import Mistake, PathError, SpecError
from slurmtrain.model.experiment.kinds import WrittenFloat, WrittenInt, WrittenNumber, as_written, suggestion
from slurmtrain.system.files import describe_os_error

KeyPath = tuple[str, ...]
# A number in base 60: YAML 1.1 reads 12:00:00 as 43200.
SEXAGESIMAL = re.compile(r"[-+]?[1-9][0-9_]*(?::[0-5]?[0-9])+")
# A number such as 1e-3: its tag, its pattern, and how it may begin.
_SHORT_FLOAT = (
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)
# A colour, but neither a word such as 'add' nor the number of an issue.
_COLOUR = re.compile(
    r" +#(?=\d*[a-f]+\d|\d+[a-f]|([a-f\d])\1+\b|\d{6}\b)(?:[\da-f]{3,4}|[\da-f]{6}|[\da-f]{8})(?![\w-])", re.IGNORECASE
)
# A key and its value on one line, also in a list.
_ENTRY = re.compile(r"(\s*(?:-\s+)*)([\w.-]+:\s+|(?<=- ))(\S.*?)\s*")
# Limits against files whose aliases multiply ("billion laughs"): number of values after expanding aliases, and depth.
_MAX_VALUES = 100_000
_MAX_DEPTH = 60
# The tags that mappings and lists have by themselves: any other stands for an object of some program.
_PLAIN_TAGS = frozenset({"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"})


@dataclass(slots=True)
class YamlDocument:
    """A YAML mapping as plain data.

    ``lines``: the line of each key, counted from 1. ``spans``: where its value begins and ends, as character offsets.
    ``mistakes``: mistakes that did not prevent reading. ``layers``: the documents that it is composed of, the first
    ones below the others; a key is where the last of them has it.
    """

    name: str
    data: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)
    spans: dict[KeyPath, tuple[int, int]] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    layers: Sequence[YamlDocument] = ()

    def place_of(self, path: KeyPath) -> str:
        """``file:line`` of a key, or of the innermost enclosing section that is written; line 1 if there is none."""
        for length in range(len(path), 0, -1):
            for document in reversed(self.layers or [self]):
                if (line := document.lines.get(path[:length])) is not None:
                    return f"{document.name}:{line}"
        return f"{self.name}:1"


def read_text(path: Path) -> str:
    """The text of a file, without a byte order mark. Raises PathError."""
    try:
        return decode_text(path.read_bytes(), path)
    except FileNotFoundError:
        specs = [each.name for each in path.parent.glob("*.y*ml")]
        raise PathError(f"{path}: this file does not exist{suggestion(path.name, specs)}") from None
    except IsADirectoryError:
        raise PathError(f"{path}: this is a directory; name the YAML file in it") from None
    except OSError as error:
        raise PathError(f"{path}: cannot be read: {describe_os_error(error)}") from error


def decode_text(content: bytes, path: Path) -> str:
    """The text that a file contains, without a byte order mark. Raises PathError if it is not UTF-8."""
    try:
        # As Python reads text files: every kind of line end is a line feed.
        return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()
    except UnicodeDecodeError as error:
        raise PathError(f"{path}: this is not UTF-8 text (byte {error.start}); is it a YAML file?") from None


def parse_yaml(text: str, name: str) -> YamlDocument:
    """Parse a YAML mapping; ``name`` is the file's name in messages.

    Raises SpecError if ``text`` is not a YAML mapping; lesser mistakes are listed in the document.
    """
    try:
        loader = FileLoader(text)
        root = loader.get_single_node()
        document = YamlDocument(name, {})
        data = _NodeReader(loader, document).read(root, ()) if isinstance(root, yaml.MappingNode) else {}
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise SpecError([Mistake(f"{name}:{line}", "", f"this is not YAML: {error.reason}")]) from None
    except RecursionError:
        raise SpecError([Mistake(f"{name}:1", "", "this is nested too deeply to be read")]) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        why = " ".join(filter(None, (error.context, error.problem)))
        line = mark.line if mark else 0
        problem = why if isinstance(error, _TooLong | _Cut) else f"this is not YAML: {why}{_find_cure(text, line)}"
        raise SpecError([Mistake(f"{name}:{line + 1}", "", problem)]) from None
    except yaml.YAMLError as error:
        raise SpecError([Mistake(f"{name}:1", "", f"this is not YAML: {' '.join(str(error).split())}")]) from None
    if root is None:
        raise SpecError(
            [Mistake(f"{name}:1", "", "the file is empty; docs/getting-started.md shows what a spec looks like")]
        )
    if not isinstance(root, yaml.MappingNode):
        raise SpecError(
            [Mistake(f"{name}:{root.start_mark.line + 1}", "", "expected a mapping (key: value) at the top")]
        )
    document.data = data
    return document


def _find_cure(text: str, line: int) -> str:
    """Half a sentence with what to write instead of a line, counted from 0; a whole line has been tried."""
    lines = text.split("\n")

    def helps(number: int, instead: str) -> bool:
        """Whether the first mistake is further down then, or there is none."""
        try:
            FileLoader("\n".join([*lines[:number], instead, *lines[number + 1 :]])).get_single_node()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            return mark is not None and mark.line > max(line, number)
        except (yaml.YAMLError, RecursionError):
            return False
        return True

    # A parser complains about some mistakes only at the next line.
    for number in (line, line - 1):
        if not 0 <= number < len(lines):
            continue
        for cure, instead in _possible_cures(lines[number], lines[number - 1] if number else ""):
            if helps(number, instead):
                return f"; {cure}: {instead.strip()}"
    return "; a value with a special character needs quotes"


def _possible_cures(line: str, above: str) -> Iterator[tuple[str, str]]:
    """What may be right instead of a line, each with what was done to it; ``above``: the line above."""
    indent, rest = line[: len(line) - len(line.lstrip())], line.lstrip()
    if "\t" in indent:
        yield "indent with blanks instead of tabs", indent.replace("\t", "  ") + rest
    if indent and (same := above[: len(above) - len(above.lstrip())]) != indent:
        yield "indent it like the line above", same + rest
    entry = _ENTRY.fullmatch(line)
    if entry is None:
        return
    key, value = f"{entry[1]}{entry[2]}", entry[3]
    if value[0] in "'\"" and value.count(value[0]) == 1:
        yield "close the quotes", f"{key}{value}{value[0]}"
    elif value[0] == "[" and "]" not in value:
        yield "close the brackets", f"{key}{value}]"
    elif value[0] not in "[{" or re.match(r"\{[\w.]+\}[^\s,]", value):
        yield "put the value in quotes", f"{key}{_in_quotes(value)}"


def _in_quotes(value: str) -> str:
    if '"' in value or "\\" in value:
        return "'" + value.replace("'", "''") + "'"
    return f'"{value}"'


def parse_value(raw: str) -> Any:
    """A value from the command line: as in a file, but ``12:00:00`` is text, since the shell removes quotes.

    Raises ValueError with a message for the user.
    """
    try:
        loader = FileLoader(raw)
        node = loader.get_single_node()
        document = YamlDocument("", {})
        value = None if node is None else _NodeReader(loader, document, times=False).read(node, ())
    except RecursionError:
        raise ValueError("the value is nested too deeply") from None
    except SpecError as error:
        raise ValueError(error.mistakes[0].message) from None
    except yaml.YAMLError as error:
        raise ValueError(f"the value is not YAML: {' '.join(str(error).split())}") from None
    if document.mistakes:
        raise ValueError(document.mistakes[0].message)
    return value


def write_yaml(data: Any, *, flow: bool = False) -> str:
    """The YAML of plain data. :func:`parse_yaml` reads it as the same: text that looks like a number is quoted.

    Args:
        data: The data.
        flow: Whether lists and mappings are written as in ``[1, 2]``.
    """
    # So wide that PyYAML does not fold long commands.
    return yaml.dump(
        data, Dumper=FileDumper, sort_keys=False, allow_unicode=True, width=10_000, default_flow_style=flow
    )


def _cut_value(node: yaml.ScalarNode) -> str:
    """The part of a node's value that YAML has cut off as a comment, though it is none; mostly empty.

    That is a colour, or follows an option that has no value yet. Other comments are genuine.
    """
    mark = node.end_mark
    if node.style is not None or mark.buffer is None:
        return ""
    rest = mark.buffer[mark.pointer :].split("\n", 1)[0].rstrip("\0")
    is_option = node.value.rpartition(" ")[2].startswith("-")
    is_cut = re.match(r" +#\w", rest) if is_option else _COLOUR.match(rest)
    return re.split(r"[\s,\]}]", rest.lstrip(" "), maxsplit=1)[0] if is_cut else ""


class _TooLong(yaml.MarkedYAMLError):
    """There are more keys and values than a spec may have."""


class _Cut(yaml.MarkedYAMLError):
    """YAML has cut a value."""


class FileLoader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, but ``1e-3`` is a number, as in YAML 1.2; PyYAML itself requires ``1.0e-3``.

    What can only have too many values is not read to its end, which would take minutes.
    """

    nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """A node, as PyYAML calls it with its ``parent`` and ``index``. Raises MarkedYAMLError after too many."""
        self.nodes += 1
        if self.nodes > _MAX_VALUES:
            raise _TooLong(problem=f"more than {_MAX_VALUES} keys and values", problem_mark=self.get_mark())
        node = super().compose_node(parent, index)
        if isinstance(node, yaml.ScalarNode) and (cut := _cut_value(node)):
            whole = _in_quotes(f"{node.value} {cut}".strip())
            raise _Cut(
                problem=f"'{cut}' is a comment to YAML, so that the value is only '{node.value}'; put it in "
                f"quotes: {whole} (or write a comment with a blank after '#')",
                problem_mark=node.end_mark,
            )
        return node


FileLoader.add_implicit_resolver(*_SHORT_FLOAT)


class FileDumper(yaml.SafeDumper):
    """Writes what a :class:`FileLoader` reads, without aliases."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 (as PyYAML calls it)
        """Whether to write ``data`` again where it occurs again: always."""
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Text ``data``, in double quotes if PyYAML might otherwise fold it at an unusual line break."""
        is_plain = data.replace("\n", "").isprintable()
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if is_plain else '"')

    def represent_written(self, data: WrittenNumber) -> yaml.ScalarNode:
        """A number ``data`` as it was written."""
        kind = "int" if isinstance(data, int) else "float"
        return self.represent_scalar(f"tag:yaml.org,2002:{kind}", data.written)


FileDumper.add_implicit_resolver(*_SHORT_FLOAT)
FileDumper.add_representer(str, FileDumper.represent_str)
for _kind in (WrittenInt, WrittenFloat):
    FileDumper.add_representer(_kind, FileDumper.represent_written)


class _NodeReader:
    """Converts YAML nodes to plain data, and records in the document where each is and what is wrong with it."""

    def __init__(self, loader: yaml.SafeLoader, document: YamlDocument, *, times: bool = True) -> None:
        """``times``: whether values with colons are what YAML makes of them, and not text."""
        self._loader = loader
        self._document = document
        self._times = times
        self._count = 0

    def read(self, node: yaml.Node, at: KeyPath, above: tuple[int, ...] = ()) -> Any:
        """The data of ``node``, which is the value of the key ``at``; ``above``: ids of the enclosing nodes.

        Raises SpecError if there are more nodes, or more deeply nested ones, than a spec may have.
        """
        self._count += 1
        if len(above) > _MAX_DEPTH:
            raise SpecError([Mistake(self._where(node), "", f"nested more than {_MAX_DEPTH} levels deep")])
        if id(node) in above:
            self._report(node, at, "this alias refers to itself")
            return None
        if self._count > _MAX_VALUES:
            message = f"more than {_MAX_VALUES} values after aliases are expanded"
            raise SpecError([Mistake(self._where(node), "", message)])
        tags = _PLAIN_TAGS if isinstance(node, yaml.CollectionNode) else self._loader.yaml_constructors
        if node.tag not in tags:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            self._report(node, at, f"a spec holds plain values: leave out the tag {tag}")
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, at, (*above, id(node)))
        if isinstance(node, yaml.SequenceNode):
            for number, item in enumerate(node.value):
                self._document.lines[*at, str(number)] = item.start_mark.line + 1
            return [self.read(item, (*at, str(i)), (*above, id(node))) for i, item in enumerate(node.value)]
        return self._scalar(node, at)

    def _mapping(self, node: yaml.MappingNode, at: KeyPath, above: tuple[int, ...]) -> dict[str, Any]:
        first_lines: dict[str, int] = {}
        for key_node, _ in node.value:
            key = self._key(key_node, at)
            if key in first_lines and key != "<<":
                message = f"this key appears twice, first on line {first_lines[key]}; keep one of them"
                self._report(key_node, (*at, str(key)), message)
            elif key is not None:
                first_lines[key] = key_node.start_mark.line + 1
        # Merge keys (<<) are expanded only after the search for duplicates: overriding a merged key is not a mistake.
        self._loader.flatten_mapping(node)
        data = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            path = (*at, key_node.value)
            self._document.lines[path] = key_node.start_mark.line + 1
            self._document.spans[path] = (value_node.start_mark.index, value_node.end_mark.index)
            data[key_node.value] = self.read(value_node, path, above)
        return data

    def _key(self, node: yaml.Node, at: KeyPath) -> str | None:
        """The text of the key ``node`` in the value of ``at``; None for none, which is reported."""
        if not isinstance(node, yaml.ScalarNode):
            self._report(node, at, "a key is a word, not a list or a mapping")
            return None
        try:
            node.value = _whole_characters(node.value)
        except UnicodeDecodeError as error:
            node.value = ascii(node.value)
            self._report(node, (*at, node.value), f"this key cannot be read: {error}")
        return str(node.value)

    def _scalar(self, node: yaml.Node, at: KeyPath) -> Any:
        # Only unquoted values: YAML too reads a quoted 12:00:00 as text.
        plain = isinstance(node, yaml.ScalarNode) and node.style is None
        if plain and not self._times and ":" in node.value:
            node.tag = "tag:yaml.org,2002:str"
        try:
            value = self._loader.construct_object(node)
            if isinstance(value, str):
                value = _whole_characters(value)
        # PyYAML's constructors raise whatever their conversions raise: KeyError for !!bool x, IndexError for !!int ''.
        except (yaml.YAMLError, ValueError, LookupError, OverflowError, AttributeError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            self._report(node, at, f"this value cannot be read: {type(error).__name__}: {reason}")
            return None
        if plain and isinstance(value, int | float) and SEXAGESIMAL.fullmatch(node.value):
            quoted = f'put it in quotes: "{node.value}"'
            self._report(node, at, f"YAML reads an unquoted {node.value} as the number {value}; {quoted}")
            return node.value
        # Dates and binary data: plans are stored as JSON, which has neither.
        if not (value is None or isinstance(value, bool | int | float | str)):
            self._report(node, at, f"YAML reads this as a {type(value).__name__}; put it in quotes")
            return None
        return as_written(value, node.value) if plain else value

    def _report(self, node: yaml.Node, at: KeyPath, message: str) -> None:
        self._document.mistakes.append(Mistake(self._where(node), ".".join(at), message))

    def _where(self, node: yaml.Node) -> str:
        return f"{self._document.name}:{node.start_mark.line + 1}"


def _whole_characters(text: str) -> str:
    r"""A ``text`` without pairs of surrogates, as which JSON writes what is beyond 16 bits.

    Raises UnicodeDecodeError for a lone one ("\ud800"), which no file that slurmtrain writes could contain.
    """
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
