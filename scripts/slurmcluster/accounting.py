"""Accounts, users and QOS."""

from __future__ import annotations

import os
import pwd
from collections.abc import Sequence

from .cluster import Cluster
from .processes import WrongInput, run

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
    missing = [user for user in people if f"{ACCOUNT}|{user}" not in associations]
    additions = [
        # Every cluster has an account root.
        ("root|" in associations, "cluster", [cluster.name]),
        (set(QOS) <= _list(cluster, "qos", "name"), "qos", [",".join(QOS)]),
        (f"{ACCOUNT}|" in associations, "account",
         [ACCOUNT, this_cluster, f"qos={','.join(QOS)}", f"defaultqos={QOS[0]}"]),
        (not missing, "user", [",".join(missing), f"account={ACCOUNT}", f"defaultaccount={ACCOUNT}", this_cluster]),
    ]  # fmt: skip
    for is_there, entity, words in additions:
        if not is_there:
            _sacctmgr(cluster, "-iQ", "add", entity, *words)


def works(cluster: Cluster) -> bool:
    """Whether the controller is registered, so that jobs reach the accounting."""
    shown = _sacctmgr(cluster, "-nP", "show", "cluster", cluster.name, "format=controlhost", check=False)
    return shown.strip() != ""


def _list(cluster: Cluster, entity: str, columns: str, *conditions: str) -> set[str]:
    return set(_sacctmgr(cluster, "-nP", "show", entity, *conditions, f"format={columns}").split())


def _sacctmgr(cluster: Cluster, *arguments: str, check: bool = True) -> str:
    return run(["sacctmgr", *arguments], environment=cluster.environment, check=check).stdout
