"""Accounts, users and QOS."""

from __future__ import annotations

import os
import pwd
from collections.abc import Sequence

from .cluster import Cluster
from .daemons import environment
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


def ensure(cluster: Cluster, wanted: list[str]) -> None:
    """Add what is missing."""
    here = f"clusters={cluster.name}"
    known = _list(cluster, "association", "account,user", here)
    # Every cluster has an account root.
    if "root|" not in known:
        _do(cluster, "add", "cluster", cluster.name)
    missing = [qos for qos in QOS if qos not in _list(cluster, "qos", "name")]
    if missing:
        _do(cluster, "add", "qos", ",".join(missing))
    if f"{ACCOUNT}|" not in known:
        _do(cluster, "add", "account", ACCOUNT, here, f"qos={','.join(QOS)}", f"defaultqos={QOS[0]}")
    missing = [user for user in wanted if f"{ACCOUNT}|{user}" not in known]
    if missing:
        _do(cluster, "add", "user", ",".join(missing), f"account={ACCOUNT}", f"defaultaccount={ACCOUNT}", here)


def works(cluster: Cluster) -> bool:
    """Whether the controller is registered, so that jobs reach the accounting."""
    done = _sacctmgr(cluster, "-nP", "show", "cluster", cluster.name, "format=controlhost", check=False)
    return done.strip() != ""


def _list(cluster: Cluster, what: str, columns: str, *conditions: str) -> set[str]:
    return set(_sacctmgr(cluster, "-nP", "show", what, *conditions, f"format={columns}").split())


def _do(cluster: Cluster, *arguments: str) -> None:
    _sacctmgr(cluster, "-iQ", *arguments)


def _sacctmgr(cluster: Cluster, *arguments: str, check: bool = True) -> str:
    return run(["sacctmgr", *arguments], environment=environment(cluster), check=check).stdout
