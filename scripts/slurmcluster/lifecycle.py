"""Up, down, and single nodes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from . import accounting, config, daemons, network, packages, releases, slurm
from .cluster import ROOT, Cluster, Settings, machine_lock
from .processes import (
    CannotHere,
    ClusterError,
    Daemon,
    WrongInput,
    end_all,
    identity,
    inside,
    listing,
    namespace_of,
    wait_until,
)


def up(cluster: Cluster, requested: dict[str, Any], users: list[str]) -> tuple[Settings, list[str]]:
    """Start what is missing of a cluster; returns its settings and what a person should know."""
    everyone = accounting.users(users)
    packages.ensure(packages.OF_RELEASES if _settings(cluster, requested).slurm else packages.OF_SLURM)
    packages.remove_stale_policy()
    with cluster.locked():
        try:
            settings = _settle(cluster, requested)
            if settings.slurm:
                daemons.link_programs(cluster, releases.programs(releases.ensure(settings.slurm)))
            _end_strays(cluster)
            pids = daemons.running(cluster)
            with ThreadPoolExecutor(1) as meanwhile:
                database = meanwhile.submit(daemons.make_database, cluster)
                limited = network.ensure(cluster, settings)
                config.write(cluster, settings)
                database.result()
            _start_daemons(cluster, settings, pids, everyone)
        except CannotHere:
            _remove_all(cluster)
            raise
    return settings, [] if limited else ["this kernel has no tbf queue: the slow network is as fast as the other"]


def _start_daemons(cluster: Cluster, settings: Settings, pids: dict[str, int], users: list[str]) -> None:
    if "munged" not in pids:
        daemons.start_munged(cluster)
    if "mariadbd" not in pids:
        daemons.start_database(cluster)
    if "slurmdbd" not in pids:
        daemons.start_slurmdbd(cluster, settings)
    accounting.ensure(cluster, users)
    watched: dict[Path, Daemon] = {}
    if "slurmctld" not in pids:
        watched[cluster.log("slurmctld")] = daemons.start_slurmctld(cluster, settings)
    dead = [node for node in settings.names if not daemons.node_runs(cluster, node, pids)]
    _start_nodes(cluster, settings.names, dead, watched)
    wait_until(lambda: "" if accounting.works(cluster) else "accounting", daemons.PATIENCE, watched)


def _start_nodes(cluster: Cluster, nodes: list[str], dead: list[str], watched: dict[Path, Daemon]) -> None:
    """Start slurmd on the dead nodes, and wait until all are usable."""
    current = slurm.nodes(cluster)
    started = {node: current.get(node, slurm.MISSING) for node in dead}
    slurmds = {cluster.log(node): daemons.start_slurmd(cluster, node) for node in dead}
    slurm.wait_for_nodes(cluster, nodes, daemons.PATIENCE, started, {**watched, **slurmds})


def down(cluster: Cluster) -> None:
    """Remove all that a cluster left."""
    packages.remove_stale_policy()
    with cluster.locked():
        _remove_all(cluster)


def kill_node(cluster: Cluster, node: int) -> int:
    """Cut a node's power: no process of it says goodbye, and nothing that it sends arrives any more."""
    name = cluster.node(node)
    with cluster.locked():
        network.plug(cluster, [node], False)
        namespace = identity(network.NAMESPACES / cluster.namespace(name))
        return end_all(lambda: inside({namespace} if namespace else set()))


def start_node(cluster: Cluster, node: int) -> bool:
    """Start a node again and wait until it is usable; returns whether it was not running."""
    name = cluster.node(node)
    with cluster.locked():
        pids = daemons.running(cluster)
        if "slurmctld" not in pids:
            raise ClusterError(f"slurmctld does not run; start what is missing with 'up --name {cluster.name}'")
        dead = [] if daemons.node_runs(cluster, name, pids) else [name]
        network.plug(cluster, [node], True)
        # Whoever asks for a node wants it used, drained or not.
        if "drain" in slurm.nodes(cluster).get(name, slurm.MISSING).state:
            slurm.resume(cluster, name)
        _start_nodes(cluster, [name], dead, {})
        return bool(dead)


def _settings(cluster: Cluster, requested: dict[str, Any]) -> Settings:
    """The recorded settings, or new ones as requested, without an index yet. Raises WrongInput if they contradict."""
    requested = {key: value for key, value in requested.items() if value is not None}
    settings = cluster.read_settings() or Settings(**requested)
    current = dataclasses.asdict(settings)
    other = [f"--{key} {value} (it has {current[key]})" for key, value in requested.items() if value != current[key]]
    if other:
        raise WrongInput(
            f"cluster '{cluster.name}' is there with other settings: {', '.join(other)}; "
            f"run 'scripts/cluster down --name {cluster.name}' first"
        )
    return settings


def _settle(cluster: Cluster, requested: dict[str, Any]) -> Settings:
    """The recorded settings, or new ones with a free index, recorded."""
    settings = _settings(cluster, requested)
    if cluster.read_settings() is None:
        _clear(cluster)
        with machine_lock():
            settings = dataclasses.replace(settings, index=network.free_index(_indices()))
            cluster.write_settings(settings)
    return settings


def _indices() -> set[int]:
    """Those of the other clusters, whether they run or not."""
    used = set()
    for path in ROOT.glob("*/cluster.json"):
        try:
            used.add(int(json.loads(path.read_text())["index"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # being made or removed: whether its networks are in use is looked at, too
    return used


def _remove_all(cluster: Cluster) -> None:
    _clear(cluster)
    for directory in (cluster.directory, network.ETC):
        with contextlib.suppress(OSError):
            directory.rmdir()


def _clear(cluster: Cluster) -> None:
    """End all that runs of a cluster, and remove what it has outside of its directory and in it."""
    _end_strays(cluster, all_of_them=True)
    network.remove(cluster)
    end_all(lambda: [pid for pid, _ in listing(cluster.directory)])
    for path in network.ETC.glob(cluster.namespace_prefix + "*"):
        shutil.rmtree(path)
    for path in cluster.directory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _end_strays(cluster: Cluster, all_of_them: bool = False) -> None:
    """End nodes, with their jobs, whose namespace has lost its name."""
    named = set() if all_of_them else network.node_identities(cluster)
    namespaces = {namespace_of(pid) for pid, arguments in listing(cluster.directory) if "-N" in arguments}
    strays = {namespace for namespace in namespaces if namespace is not None} - named
    end_all(lambda: inside(strays))
