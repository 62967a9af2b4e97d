"""What is left out at the beginning and at the end of processes that import much."""

from __future__ import annotations

import gc

import pytest
from helpers.program import program

from slurmtrain.system.interpreter import without_collection


@pytest.mark.parametrize("before", [True, False])
def test_garbage_is_looked_for_afterwards_as_it_was_before_also_where_an_import_fails(before: bool) -> None:
    collected = gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        with pytest.raises(ImportError), without_collection():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == before
    finally:
        (gc.enable if collected else gc.disable)()


def test_what_was_made_meanwhile_counts_as_old_and_is_still_collected_once_it_is_garbage() -> None:
    with program(
        """
import gc, weakref
from slurmtrain.system.interpreter import without_collection
class Node: pass
with without_collection():
    made = Node()
    made.itself = made
print(any(each is made for each in gc.get_objects(generation=2)), flush=True)
reference = weakref.ref(made)
del made
gc.collect()
print(reference() is None, flush=True)
kept = [[] for _ in range(2_000)]
gc.freeze()
frozen = gc.get_freeze_count()
with without_collection():
    pass
print(gc.get_freeze_count() == frozen, flush=True)
"""
    ) as process:
        assert [process.line(), process.line(), process.line()] == ["True", "True", "True"]


def test_a_process_that_leaves_quickly_ends_in_order_and_looks_at_nothing_that_lives() -> None:
    with program(
        """
import atexit, gc, sys
from slurmtrain.system.interpreter import leave_quickly
gc.collect()  # and so not again before the end, which would make them fewer
tracked = len(gc.get_objects())
# Nearly all: the import system lets go of a few on the way.
atexit.register(lambda: print(gc.get_freeze_count() > 0.9 * tracked, flush=True))
leave_quickly()
print("here", flush=True)
sys.exit(75)
"""
    ) as process:
        assert [process.line(), process.line()] == ["here", "True"]
        assert process.ended() == (75, "")


def test_a_command_that_stays_collects_its_garbage() -> None:
    with program(
        """
import gc, weakref
from slurmtrain.system.interpreter import collect_rarely
class Node: pass
def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)
collect_rarely()
first = cycle()
kept = [[] for _ in range(200_000)]
print(first() is None, flush=True)
"""
    ) as process:
        assert process.line() == "True"
        assert process.ended() == (0, "")
