"""Slurm's lists of nodes. That they are expanded as Slurm does it is tested in tests/cluster."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slurmtrain.model.hostlist import LIMIT, compress_hostlist, expand_hostlist

NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,6}[0-9]{0,4}", fullmatch=True)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        (" , ", []),
        ("login1", ["login1"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[001-003,20]", ["n001", "n002", "n003", "n20"]),
        ("node[1],other[2-3]", ["node1", "other2", "other3"]),
        ("rack[0-1]node[2-3]", ["rack0node2", "rack0node3", "rack1node2", "rack1node3"]),
        ("n[1-2][3-4]", ["n13", "n14", "n23", "n24"]),
        ("[1-2]", ["1", "2"]),
    ],
)  # fmt: skip
def test_a_list_is_expanded_in_its_own_order_with_its_own_padding(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n[1-2", "brackets do not match at '['"),
        ("n1-2]", "brackets do not match at ']'"),
        ("n[[1-2]]", "brackets do not match"),
        ("n[2-1]", "the range '2-1' runs backwards"),
        ("n[]", "'' is neither a number nor a range"),
        ("n[1-]", "'1-' is neither"),
        ("n[+1]", "'+1' is neither"),
        ("n[a]", "'a' is neither"),
        ("n[\u0661]", "is neither"),
        ("n[1-2]m", "nothing may follow the last bracket, found 'm'"),
        ("(null)", "'(null)' is not a list of nodes"),
        ("-h", "'-h' is not a list of nodes"),
    ],
)  # fmt: skip
def test_what_is_no_list_is_refused_with_what_is_wrong_in_it(text: str, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        expand_hostlist(text)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "n[1-999999999999999]",
        f"n[0-{LIMIT}]",
        f"a,n[1-{LIMIT}]",
        "n[1-60000],m[1-60000]",
    ],
)  # fmt: skip
def test_a_list_of_too_many_nodes_is_refused_before_it_is_built(text: str) -> None:
    with pytest.raises(ValueError, match="stands for more than 65536 nodes"):
        expand_hostlist(text)


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ([], ""),
        (["login1"], "login1"),
        (["n2", "n1", "n1"], "n[1-2]"),
        ([f"n{i}" for i in range(8, 12)], "n[8-11]"),
        ([f"n{i:02}" for i in range(98, 102)], "n[98-101]"),
        (["n1", "n3", "n01", "n02"], "n[1,3,01-02]"),
        (["n08", "n9", "n10"], "n[9,08,10]"),
        (["n", "n5", "m"], "m,n,n5"),
        (["rack0node1", "rack0node2", "rack1node1"], "rack0node[1-2],rack1node1"),
    ],
)  # fmt: skip
def test_nodes_are_compressed_to_ranges_of_their_trailing_numbers(hosts: list[str], text: str) -> None:
    assert compress_hostlist(hosts) == text


@pytest.mark.parametrize("host", ["", "a,b", "n[1]", "-n", "a b", "a\n", "n1;"])
def test_what_cannot_be_a_nodes_name_is_not_put_into_a_list(host: str) -> None:
    with pytest.raises(ValueError, match="cannot be the name of a node"):
        compress_hostlist(["n1", host])


@given(st.lists(NAMES))
@example(["n9", "n09", "n10", "n010", "n", "n00", "n0"])
@example(["n" + "9" * 19, "n1" + "0" * 19, "n" + "0" * 25])
def test_what_was_compressed_expands_to_the_same_nodes(hosts: list[str]) -> None:
    expanded = expand_hostlist(compress_hostlist(hosts))
    assert sorted(expanded) == sorted(set(hosts))
