"""Runs on a real Slurm cluster, which is started for these tests and ended after them."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.cluster import Cluster, ClusterSite, Person, ordinary_person
from helpers.cluster_runs import STEPS
from helpers.expected_weights import expected_digests


@pytest.fixture(scope="session")
def person() -> Iterator[Person]:
    """An ordinary user."""
    if os.geteuid() != 0:
        pytest.skip("only root can start a Slurm cluster on this machine")
    with ordinary_person() as someone:
        yield someone


@pytest.fixture(scope="session")
def running_cluster(person: Person) -> Iterator[Cluster]:
    """The cluster, for the whole session."""
    started = Cluster()
    try:
        started.up()
        yield started
    finally:
        started.script("down", check=False)


@pytest.fixture
def cluster(running_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, all nodes idle before and after."""
    yield running_cluster
    running_cluster.quiet()


@pytest.fixture
def site(cluster: Cluster, person: Person) -> Iterator[ClusterSite]:
    """A fresh runs root of the ordinary user's."""
    with _fresh_site(cluster, person) as fresh:
        yield fresh


@pytest.fixture(scope="module")
def shared_site(running_cluster: Cluster, person: Person) -> Iterator[ClusterSite]:
    """A runs root of the ordinary user's, for runs that several tests of a file look at."""
    with _fresh_site(running_cluster, person) as fresh:
        yield fresh


@pytest.fixture(scope="session")
def undisturbed() -> str:
    """The hash of the weights that a run of two ranks ends with which nothing disturbs."""
    [digest] = expected_digests(STEPS, ranks=2)
    return digest


@contextlib.contextmanager
def _fresh_site(cluster: Cluster, person: Person) -> Iterator[ClusterSite]:
    # The last processes of a job may still write here; whoever removes the home removes what they leave.
    with tempfile.TemporaryDirectory(prefix="site-", dir=person.home, ignore_cleanup_errors=True) as name:
        path = Path(name)
        os.chown(path, person.uid, person.gid)
        yield ClusterSite(path, cluster, person)
