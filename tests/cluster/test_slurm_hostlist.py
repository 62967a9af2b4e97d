"""Lists of nodes are expanded as the real scontrol does it, which needs a slurm.conf but no running controller."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmtrain.model.hostlist import compress_hostlist, expand_hostlist

SCONTROL = shutil.which("scontrol")
pytestmark = pytest.mark.skipif(SCONTROL is None, reason="there is no scontrol on this machine")
# Each costs a process of scontrol's.
EXAMPLES = settings.default.max_examples

LETTERS = st.text("abn-.", max_size=2).map(lambda text: "n" + text)
NUMBERS = st.one_of(st.integers(0, 12), st.integers(95, 103))


@st.composite
def ranges(draw: st.DrawFn) -> str:
    """A number or a range, padded or not; both ends may be padded differently."""
    low, width = draw(NUMBERS), draw(st.integers(1, 4))
    if draw(st.booleans()):
        return f"{low:0{width}}"
    high = low + draw(st.integers(0, 5))
    return f"{low:0{width}}-{high:0{draw(st.sampled_from([1, width, 4]))}}"


GROUPS = st.lists(ranges(), min_size=1, max_size=3).map(lambda parts: f"[{','.join(parts)}]")
PLAIN = st.builds(lambda letters, digits: letters + digits, LETTERS, st.from_regex(r"[0-9]{0,4}", fullmatch=True))
LITERALS = st.one_of(st.just(""), PLAIN)
# Up to three groups of ranges, each after a literal that may be empty; nothing behind the last one.
BRACKETED = st.lists(st.builds(lambda letters, group: letters + group, LITERALS, GROUPS), min_size=1, max_size=3).map(
    "".join
)
LISTS = st.builds(
    lambda items, separator: separator.join(items),
    st.lists(st.one_of(PLAIN, BRACKETED), min_size=1, max_size=4),
    st.sampled_from([",", ", ", " ", ",,"]),
)
# Pieces of lists in any order: most of these are no lists.
SCRAPS = st.lists(
    st.sampled_from(["n", "m1", "0", "7", "10", "-", ",", "[", "]", "[1-2]", "[3,5]", " ", ".", "(", "[08-9]"]),
    min_size=1,
).map("".join)


@pytest.fixture(scope="module")
def hostnames(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str] | None]:
    """What ``scontrol show hostnames`` prints for a list; None where it refuses it."""
    configuration = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    configuration.write_text("ClusterName=none\nSlurmctldHost=localhost\n")

    def ask(text: str) -> list[str] | None:
        shown = subprocess.run(
            [str(SCONTROL), "show", "hostnames", text],
            env={"SLURM_CONF": str(configuration)},
            capture_output=True,
            text=True,
            timeout=30,
        )
        # It exits with 0 also where it refuses.
        return None if "Invalid hostlist" in shown.stdout + shown.stderr else shown.stdout.splitlines()

    return ask


@settings(max_examples=4 * EXAMPLES)
@given(text=LISTS)
def test_every_list_gives_the_nodes_of_scontrol_in_its_order(
    hostnames: Callable[[str], list[str] | None], text: str
) -> None:
    assert expand_hostlist(text) == hostnames(text)


@settings(max_examples=2 * EXAMPLES)
@given(text=SCRAPS)
def test_whatever_is_read_as_a_list_scontrol_reads_as_the_same_nodes(
    hostnames: Callable[[str], list[str] | None], text: str
) -> None:
    try:
        hosts = expand_hostlist(text)
    except ValueError:
        return
    assert hosts == hostnames(text)


@settings(max_examples=EXAMPLES)
@given(hosts=st.lists(PLAIN, min_size=1, max_size=12))
def test_a_compressed_list_is_expanded_by_scontrol_to_the_same_nodes(
    hostnames: Callable[[str], list[str] | None], hosts: list[str]
) -> None:
    assert sorted(hostnames(compress_hostlist(hosts)) or []) == sorted(set(hosts))


@pytest.mark.parametrize("text", ["a[1-2]b[3,5-6]c", "n[1]m,k", "[1-2]a", "n[2-1]", "n[]", "n[a]", "n[1-70000]"])
def test_what_scontrol_refuses_is_refused(hostnames: Callable[[str], list[str] | None], text: str) -> None:
    assert hostnames(text) is None
    with pytest.raises(ValueError):
        expand_hostlist(text)


@pytest.mark.parametrize("text", ["n[1-65536]", "r[0-15]n[0-1023]", "a[1-20]b[01-20]c[1-20]"])
def test_long_lists_are_expanded_as_scontrol_does(hostnames: Callable[[str], list[str] | None], text: str) -> None:
    assert expand_hostlist(text) == hostnames(text)
