"""What scripts without a session get when they import torch.

That is guarded data-loader workers, and repeatable numbers.

Workers are protected from signals that Slurm sends to all processes of a step. Torch calls :func:`guard_loaders` at the
end of its own import, since it is registered as an entry point in the group ``torch.backends``
(TORCH_DEVICE_BACKEND_AUTOLOAD in torch's documentation). Nothing else reaches a script that does not import slurmtrain:
a signal that is ignored, or handled, before the worker starts is not ignored there, because torch installs a handler of
its own in each worker; and one that is blocked could not be used to terminate a worker either, which multiprocessing
does at exit, and would wait for ever.
"""

from __future__ import annotations

import contextlib
import os
import sys
from multiprocessing.process import current_process, parent_process

# Keeps the guard from being garbage collected.
_kept: list[object] = []


def guard_loaders() -> None:
    """Guard the data-loader workers that this process will start, if it belongs to a rank. Never raises.

    A child of ``multiprocessing`` has received the guard of its parent. Random numbers are seeded in it too: a new
    interpreter has no state of its parent's.
    """
    if "SLURMTRAIN_ATTEMPT_DIR" not in os.environ:
        return
    if "SLURMTRAIN_SEED" in os.environ or "SLURMTRAIN_DETERMINISTIC" in os.environ:
        # As the session does for the spec's 'seed' and 'deterministic'.
        try:
            from slurmtrain.runtime.checkpoint.rng import make_repeatable
            from slurmtrain.runtime.environment.node import this_worker

            make_repeatable(this_worker())
        except Exception as error:  # noqa: BLE001 (the script's import of torch would fail)
            print(f"slurmtrain: the script is not repeatable: {error!r}", file=sys.stderr, flush=True)
    # Even a child that is still importing the main module.
    is_child = parent_process() is not None or hasattr(current_process(), "_inheriting")
    if _kept or is_child:
        return
    # An exception would make the script's import of torch fail.
    with contextlib.suppress(Exception):
        from slurmtrain.runtime.training.child_signals import ChildGuard

        _kept.append(ChildGuard(loaders_only=True))
