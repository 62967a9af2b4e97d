"""What nodes run before, beside and after their ranks, on this machine."""

from __future__ import annotations

from helpers.node_helpers import (
    check_completed,
    check_logs,
    check_stopped_setup,
    check_torn_down,
    check_unready,
    sidecars,
    submit,
)
from helpers.site import Site, until


def test_a_run_has_all_of_it_on_each_node(site: Site) -> None:
    check_completed(site, "local")


def test_if_one_node_cannot_be_prepared_none_has_ranks(site: Site) -> None:
    check_unready(site, "local")


def test_a_cancelled_run_is_torn_down(site: Site) -> None:
    run_id = submit(site, "local", "sleep 600")
    until(lambda: len(sidecars(site)) == 2, "the sidecars")
    site.until_state(run_id, "running")
    site.call("cancel", run_id)
    site.until_state(run_id, "cancelled")
    check_logs(site, run_id)


def test_what_was_staged_is_cleaned_up_whatever_fails_before_there_are_ranks(site: Site) -> None:
    check_torn_down(site, "local")


def test_a_run_that_is_cancelled_during_its_setup_is_torn_down(site: Site) -> None:
    check_stopped_setup(site, "local")
