"""Accounts, users and QOS."""

from __future__ import annotations

import os
import pwd
from collections.abc import Sequence

from .cluster import Cluster
from .errors import WrongInput
from .processes import run

ACCOUNT = "research"
QOS = ("normal", "low")


def users(named: Sequence[str]) -> list[str]:
    """Who may submit: root, whoever called sudo, and those that were named, who must exist."""
    for user in named:
        if not _exists(user):
            raise WrongInput(f"there is no user '{user}' on this machine; make one with 'useradd {user}'")
    invoking = os.environ.get("SUDO_USER", "")
    return list(dict.fromkeys(["root", *([invoking] if _exists(invoking) else []), *named]))


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except (KeyError, ValueError):
        return False
    return True


def ensure(cluster: Cluster, people: list[str]) -> None:
    """Add what is missing."""
    this_cluster = f"clusters={cluster.name}"
    associations = _list(cluster, "association", "account,user", this_cluster)
    # Every cluster has an account root.
    if "root|" not in associations:
        _do(cluster, "add", "cluster", cluster.name)
    missing = [qos for qos in QOS if qos not in _list(cluster, "qos", "name")]
    if missing:
        _do(cluster, "add", "qos", ",".join(missing))
    if f"{ACCOUNT}|" not in associations:
        _do(cluster, "add", "account", ACCOUNT, this_cluster, f"qos={','.join(QOS)}", f"defaultqos={QOS[0]}")
    missing = [user for user in people if f"{ACCOUNT}|{user}" not in associations]
    if missing:
        _do(cluster, "add", "user", ",".join(missing), f"account={ACCOUNT}", f"defaultaccount={ACCOUNT}", this_cluster)


def works(cluster: Cluster) -> bool:
    """Whether the controller is registered, so that jobs reach the accounting."""
    shown = _sacctmgr(cluster, "-nP", "show", "cluster", cluster.name, "format=controlhost", check=False)
    return shown.strip() != ""


def _list(cluster: Cluster, entity: str, columns: str, *conditions: str) -> set[str]:
    return set(_sacctmgr(cluster, "-nP", "show", entity, *conditions, f"format={columns}").split())


def _do(cluster: Cluster, *arguments: str) -> None:
    _sacctmgr(cluster, "-iQ", *arguments)


def _sacctmgr(cluster: Cluster, *arguments: str, check: bool = True) -> str:
    return run(["sacctmgr", *arguments], environment=cluster.environment, check=check).stdout
