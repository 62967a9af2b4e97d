"""Every error that is raised on purpose; a message says what is wrong and what to do."""

from __future__ import annotations


class ClusterError(Exception):
    """Something failed."""

    exit_code = 1


class WrongInput(ClusterError):
    """What was asked for cannot be done as asked; nothing was changed."""

    exit_code = 2


class CannotHere(ClusterError):
    """This machine cannot host a cluster."""

    exit_code = 3
