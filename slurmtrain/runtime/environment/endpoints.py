"""Where node 0 listens before training, as the batch script tells it to the tasks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurmtrain.runtime.environment import variables

# The salt of the preflight's port, so that it differs from training's.
BOOTSTRAP = "bootstrap"


@dataclass(frozen=True, slots=True)
class CoordinatorEndpoints:
    """The addresses where node 0, the coordinator of a preflight, listens.

    Attributes:
        addresses: All of its addresses; it is not known which ones the other nodes can reach.
        port: The port on each.
        secret: The attempt's secret, which both sides of a connection must prove that they know.
    """

    addresses: tuple[str, ...]
    port: int
    secret: bytes

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        return {"addresses": list(self.addresses), "port": self.port, "secret": self.secret.hex()}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> CoordinatorEndpoints:
        """Read what :meth:`to_dict` returned."""
        return cls(tuple(plain["addresses"]), int(plain["port"]), bytes.fromhex(plain["secret"]))

    def variables(self) -> dict[str, str]:
        """This as environment variables for the tasks."""
        return {variables.HOME: " ".join([str(self.port), *self.addresses]), variables.HOME_SECRET: self.secret.hex()}


def pop_coordinator_endpoints() -> CoordinatorEndpoints | None:
    """The endpoints of node 0; None unless the batch script exported them and they reached this task.

    The variables are removed, so that no rank inherits the secret.
    """
    endpoints, secret = os.environ.pop(variables.HOME, ""), os.environ.pop(variables.HOME_SECRET, "")
    try:
        port, *addresses = endpoints.split()
        return (
            CoordinatorEndpoints(tuple(addresses), int(port), bytes.fromhex(secret)) if addresses and secret else None
        )
    except ValueError:
        return None
