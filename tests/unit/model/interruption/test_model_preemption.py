"""Who may use a partition."""

from __future__ import annotations

import pytest

from slurmtrain.model.interruption.preemption import Partition, may_use


@pytest.mark.parametrize(
    ("partition", "groups", "accounts", "root", "may"),
    [
        (Partition(name="p"), [], None, False, True),
        (Partition(name="p", groups=frozenset({"lab"})), ["users"], None, False, False),
        (Partition(name="p", groups=frozenset({"lab"})), ["users", "lab"], None, False, True),
        (Partition(name="p", groups=frozenset({"lab"})), [], None, True, True),
        (Partition(name="p", root_only=True), [], None, False, False),
        (Partition(name="p", accounts=frozenset({"a"})), [], {"b"}, False, False),
        (Partition(name="p", accounts=frozenset({"a"})), [], {"a", "b"}, False, True),
        (Partition(name="p", accounts=frozenset({"a"})), [], None, False, True),
    ],
)
def test_a_partition_may_be_reserved_for_groups_and_accounts(
    partition: Partition, groups: list[str], accounts: set[str] | None, root: bool, may: bool
) -> None:
    assert may_use(partition, groups, accounts, root=root) is may
