"""YAML with lines, and without its traps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.errors import PathError, SpecError
from slurmtrain.model.experiment.kinds import plain_numbers
from slurmtrain.system import yaml_file
from slurmtrain.system.yaml_file import YamlDocument, parse_value, parse_yaml, read_text


def data_of(text: str) -> dict[str, Any]:
    document = parse_yaml(text, "f")
    assert document.mistakes == []
    return document.data


def test_every_key_and_item_knows_its_line() -> None:
    document = parse_yaml("a: 1\nb:\n  c:\n    - x\n    - y\n  d: 2\n", "f")
    assert {".".join(path): line for path, line in document.lines.items()} == {
        "a": 1, "b": 2, "b.c": 3, "b.c.0": 4, "b.c.1": 5, "b.d": 6,
    }  # fmt: skip


def test_a_missing_key_has_the_line_of_the_section_around_it() -> None:
    document = parse_yaml("x: 1\na:\n  b: 1\n", "f")
    assert document.place_of(("a", "b", "c", "d")).endswith(":3")
    assert document.place_of(("a", "z")).endswith(":2")
    assert document.place_of(("z",)).endswith(":1")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 1e5),
        ("-2.5e+3", -2500.0),
        (".5e1", 5.0),
        ("1e", "1e"),
        ("e5", "e5"),
        ("1.0", 1.0),
        ("7", 7),
        ("'1e-3'", "1e-3"),
        ("true", True),
        ("null", None),
        ("", None),
        ("a:b", "a:b"),
        ("0x10", 16),
        ("1_000", 1000),
    ],
)
def test_scalars_have_the_type_that_people_expect(text: str, value: object) -> None:
    parsed = data_of(f"x: {text}\n")["x"]
    assert parsed == value
    assert type(plain_numbers(parsed)) is type(value)


@pytest.mark.parametrize(
    ("text", "seconds"), [("12:00:00", 43200), ("1:30", 90), ("-1:30", -90), ("190:20:30", 685230)]
)
def test_an_unquoted_time_is_reported_and_kept_as_text(text: str, seconds: int) -> None:
    document = parse_yaml(f"a: 1\nx: {text}\n", "f")
    assert document.data["x"] == text
    [mistake] = document.mistakes
    assert (mistake.where, mistake.key) == ("f:2", "x")
    assert mistake.message == f'YAML reads an unquoted {text} as the number {seconds}; put it in quotes: "{text}"'


@pytest.mark.parametrize("text", ["'12:00:00'", '"12:00:00"', "!!str 12:00:00", "00:30:00", "a:00", "1:99"])
def test_a_time_that_stays_text_is_not_reported(text: str) -> None:
    assert isinstance(data_of(f"x: {text}\n")["x"], str)


def test_a_duplicate_key_is_reported_at_its_second_line() -> None:
    document = parse_yaml("a: 1\nb:\n  c: 1\n  c: 2\na: 3\n", "f")
    assert [(one.where, one.key) for one in document.mistakes] == [("f:5", "a"), ("f:4", "b.c")]


def test_keys_are_words_as_they_are_written_and_aliases_and_merges_are_no_mistakes() -> None:
    assert data_of("1: a\ntrue: b\nnull: c\n2024-01-01: d\n") == {"1": "a", "true": "b", "null": "c", "2024-01-01": "d"}
    assert data_of("base: &b {x: 1, y: 2}\nuse:\n  <<: *b\n  y: 3\n")["use"] == {"x": 1, "y": 3}
    assert data_of("a: &x [1, {b: 2}]\nc: *x\nd: *x\n") == {"a": [1, {"b": 2}], "c": [1, {"b": 2}], "d": [1, {"b": 2}]}


@pytest.mark.parametrize("text", ["a: &x [*x]\n", "a: &x {b: *x}\n", "a: &x [[{c: *x}]]\n"])
def test_an_alias_of_itself_is_reported(text: str) -> None:
    [mistake] = parse_yaml(text, "f").mistakes
    assert mistake.message == "this alias refers to itself"


def test_aliases_that_multiply_are_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    with pytest.raises(SpecError, match="after aliases are expanded"):
        parse_yaml("\n".join(lines), "f")


@pytest.mark.parametrize("key", ["? [a, b]\n: 1\n", "? {a: b}\n: 1\n"])
def test_a_key_that_is_a_list_or_a_mapping_is_reported(key: str) -> None:
    [mistake] = parse_yaml(key, "f").mistakes
    assert mistake.message == "a key is a word, not a list or a mapping"


@pytest.mark.parametrize(
    "value", ["!!python/object/apply:os.system [ls]", "!!python/name:os.system ''", "!!set {a}", "!own [1]", "!own 1"]
)
def test_a_tag_that_stands_for_an_object_is_a_mistake_at_its_line(value: str) -> None:
    document = parse_yaml(f"command: x\nparams:\n  x: {value}\n", "exp.yaml")
    [mistake] = document.mistakes
    assert (mistake.where, mistake.key) == ("exp.yaml:3", "params.x")
    assert f"leave out the tag {value.partition(' ')[0]}" in mistake.message


def test_a_file_with_too_many_keys_is_refused_before_it_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_file, "_MAX_VALUES", 1000)
    # What follows them is no YAML, and would be another mistake.
    with pytest.raises(SpecError, match=r"^exp.yaml:\d+: more than 1000 keys and values"):
        parse_yaml("a:\n" + "- 1\n" * 1001 + "}", "exp.yaml")


@pytest.mark.parametrize(
    "value",
    [
        "!!bool maybe",
        "!!int ''",
        "!!int _",
        "!!float ''",
        "!!timestamp x",
        "!!python/object:os.system x",
        "=",
        "!mine x",
        "2024-99-99",
        "9" * 5000,
        "9" * 5000 + ":00",
    ],
)
def test_a_value_that_cannot_be_built_is_reported_at_its_line(value: str) -> None:
    document = parse_yaml(f"a: 1\nx: {value}\n", "f")
    assert [(one.where, one.key) for one in document.mistakes] == [("f:2", "x")]
    assert "\n" not in document.mistakes[0].message


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", 1),
        ("[a", 1),
        ("a: 1\nb: [\n", 3),
        ("- a", 1),
        ("a: 1\n--- \nb: 2\n", 2),
        ("a: \x00", 1),
        ("b: 1\na: \x1b", 2),
        ("a: 1\n<<: 3\n", 2),
    ],
)
def test_text_that_is_no_yaml_mapping_is_refused_at_its_line(text: str, line: int) -> None:
    with pytest.raises(SpecError) as raised:
        document = parse_yaml(text, "f")
        raise SpecError(document.mistakes)
    assert [one.where for one in raised.value.mistakes] == [f"f:{line}"]


@pytest.mark.parametrize("text", ["[" * 5000, "a: " + "[" * 5000, "a: " + "{b: " * 5000, "- " * 5000])
def test_text_that_is_nested_too_deeply_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        parse_yaml(text, "f")


_PIECES = ["a", "b: ", "- ", "\n", "  ", "{", "}", "[", "]", ",", ": ", "&x ", "*x", "<<: ", "!!int ", "!!bool ", "!t "]
_PIECES += ["'", '"', "|\n", ">-\n", "? ", "1:20", "1e3", "=", "#", "---\n", "%YAML 1.1\n", "\t", "\x85", "\ufeff"]
_PIECES += ["2024-01-01", "!!set "]
yaml_like = st.lists(st.sampled_from(_PIECES) | st.text(max_size=3), max_size=14).map("".join)


@given(st.text() | yaml_like)
def test_any_text_gives_a_mapping_or_a_mistake_and_nothing_else(text: str) -> None:
    try:
        document = parse_yaml(text, "f")
    except SpecError as error:
        document = YamlDocument("f", {}, mistakes=list(error.mistakes))
        refused = True
    else:
        refused = False
    assert bool(document.mistakes) >= refused
    assert all(one.where.startswith("f:") and "\n" not in one.message for one in document.mistakes)
    breaks = re.findall("\\r\\n|[\\r\\n\\x85\\u2028\\u2029]", text)
    assert all(1 <= line <= len(breaks) + 1 for line in document.lines.values())


keys = st.from_regex(r"[a-z]{1,4}", fullmatch=True)
# PyYAML writes these without quotes, for they are text in YAML 1.1, where they are numbers here.
exponential = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+")
texts = st.text().filter(lambda text: not exponential.fullmatch(text))
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(keys, plain, min_size=1, max_size=4))
def test_plain_data_reads_back_as_it_was_dumped(data: dict[str, Any]) -> None:
    document = parse_yaml(yaml.safe_dump(data), "f")
    assert document.mistakes == []
    assert document.data == data


def test_a_value_on_the_command_line_keeps_its_colons() -> None:
    values = {text: parse_value(text) for text in ("12:00:00", "1e-3", "[1, 2:30]", "{a: 1}", "true", "x")}
    assert values == {
        "12:00:00": "12:00:00", "1e-3": 0.001, "[1, 2:30]": [1, "2:30"], "{a: 1}": {"a": 1}, "true": True, "x": "x",
    }  # fmt: skip


def test_a_file_is_read_without_its_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
    assert data_of(read_text(path)) == {"a": 1, "b": 2}


def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"a: \xff")
    for name, reason in {
        "missing": "this file does not exist",
        ".": "this is a directory; name the YAML file in it",
        "binary": r"this is not UTF-8 text \(byte 3\)",
        "binary/x": "cannot be read: not a directory",
    }.items():
        with pytest.raises(PathError, match=reason):
            read_text(tmp_path / name)


def test_a_pair_of_surrogates_is_the_character_that_json_means_by_it() -> None:
    document = parse_yaml('{"a": "\\ud83d\\ude00", "b": "\\ud83d"}', "x.yaml")
    assert document.data == {"a": "\U0001f600", "b": None}
    assert [mistake.key for mistake in document.mistakes] == ["b"]
    document = parse_yaml('{"\\ud83d\\ude00": 1, "c": {"\\ud83d": 2}, "\U0001f600": 3}', "x.yaml")
    assert document.data["\U0001f600"] == 3
    twice, lone = (mistake.message for mistake in document.mistakes)
    assert "appears twice" in twice
    assert "this key cannot be read" in lone


@pytest.mark.parametrize(
    ("line", "whole"),
    [
        ("command: x --color #fff", "x --color #fff"),
        ("env: {C: red #a0b1c2}", "red #a0b1c2"),
        ("- x -n #3 # why", "x -n #3"),
        ("a: #fff", "#fff"),
    ],
)
def test_a_value_that_yaml_would_cut_at_a_hash_is_refused_with_quotes_around_it(line: str, whole: str) -> None:
    with pytest.raises(SpecError) as raised:
        parse_yaml(f"x:\n  {line}\n", "f")
    [mistake] = raised.value.mistakes
    assert mistake.where == "f:2"
    assert f'put it in quotes: "{whole}" (' in mistake.message


@pytest.mark.parametrize(
    "line", ["b # fff", "b #note", "'b' #fff", "b#fff", "1  # 3rd", "b #123", "1 # b -c #fff", "b #add it"]
)
def test_other_comments_stay_silent(line: str) -> None:
    data_of(f"x:\n  a: {line}\n")
