"""The end of the scripts of this directory."""

import os
import sys

import torch.distributed as dist


def leave() -> None:
    """Exit with code 0 when all ranks have saved.

    The interpreter's own way out would destroy process groups whose threads still run, at which torch now and then
    aborts ("terminate called without an active exception").
    """
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
