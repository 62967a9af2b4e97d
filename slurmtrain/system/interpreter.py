"""The installed package: how its own processes run Python, where its templates are, and its plug-ins.

Processes run in UTF-8, and with less garbage collection, since most is needless. Plug-ins are parts that most users
never touch: they are found through entry points, so that the core does not import them.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import NotAvailable

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# Allocations before the youngest generation is collected; Python's default of 700 suits small machines.
_YOUNG = 100_000
# Python 3.12 freezes a few hundred objects as it starts; scripts, if any, all that they have imported.
_FROZEN = 1000
# Names of files and texts are UTF-8, whatever the locale. An option, as a variable would reach the ranks, whose
# encoding is the user's.
UTF8 = ("-X", "utf8")
STRATEGIES = "slurmtrain.strategies"
"""The group of how models are distributed, besides whole replicas: meshes, communication hooks, mixed hardware."""
GROWTH = "slurmtrain.growth"
"""The group of how a run gets more nodes while it runs."""
NOTICES = "slurmtrain.notices"
"""The entry points of notifications: from a job, after a sync, and for doctor."""
SEARCHES = "slurmtrain.searches"
"""The group of who chooses the next runs of a sweep that searches."""
REGISTRIES = "slurmtrain.registries"
"""The group of registries that are no SQLite file."""
CHECKPOINT_FORMATS = "slurmtrain.checkpoint_formats"
"""The group of formats of checkpoints that trainers write."""
PAGES = "slurmtrain.pages"
"""The group of pages about what a command prints, by its name."""


def collect_rarely() -> None:
    """Collect garbage so rarely that a short command ends first, yet often enough for a long-running one.

    With this, ``slurmtrain status`` with 1,000 runs takes 4 to 8 % less CPU time, as with no collection at all.
    """
    gc.set_threshold(_YOUNG, 20, 100)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Collect no garbage while objects are made that stay. Of imports with torch it would take a third of the time.

    Afterwards they count as old, or else the next collections would go through all of them. It applies to the whole
    process, as Python's switch does.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            # Both together move all objects to the oldest generation. What a script has frozen stays frozen.
            if gc.get_freeze_count() < _FROZEN:
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def leave_quickly() -> None:
    """Let this process exit without a garbage collection over everything it has imported.

    With torch 2.13 on Python 3.11, a local run of two ranks then ends 0.4 s after its last step instead of 1.1 s, and a
    process that imports what a rank imports takes 1.7 s of CPU time instead of 2.0 s. Remaining reference cycles are
    not collected, so ``__del__`` is not called on objects in them, which Python does not promise anyway.
    """
    atexit.register(gc.freeze)


def own_python(*arguments: str) -> list[str]:
    """The command line of this Python with these ``arguments``."""
    return [sys.executable, *UTF8, *arguments]


def ensure_utf8() -> None:
    """Start this process anew unless Python uses UTF-8: in other locales it reads names of files as other characters.

    Run directories, journals and batch scripts are read in any locale, so they have the names as they are on disk.
    """
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode:
        os.execv(sys.executable, [*own_python(), *sys.orig_argv[1:]])  # noqa: S606 (this very command)


def is_utf8_by_option() -> bool:
    """Whether this process uses UTF-8 because its command line says so (:func:`own_python`)."""
    return "utf8" in sys._xoptions


def print_utf8() -> None:
    """Print any text to what becomes a log, also where ``PYTHONIOENCODING`` has an encoding that lacks some of it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def template_directory() -> Path:
    """The directory of the templates (batch scripts, network profiles).

    It is inside the package if it was installed from a wheel, otherwise next to it.
    """
    package = Path(__file__).resolve().parent.parent
    inside = package / "templates"
    return inside if inside.is_dir() else package.parent / "templates"


def declared(group: str) -> list[EntryPoint]:
    """The entry points of a ``group``, of all packages; several may have the same name."""
    # Imported here: it takes longer than all else that a submission has to know of plug-ins.
    from importlib.metadata import entry_points

    return list(entry_points(group=group))


def load_plugin(group: str, name: str) -> Any:
    """What the entry point with this ``name`` in a ``group`` refers to. Raises NotAvailable if there is none."""
    for point in declared(group):
        if point.name == name:
            return point.load()
    raise NotAvailable(
        f"there is no plug-in {name!r} ({group}), which comes with slurmtrain, so another version was installed; "
        "install it again ('pip install --force-reinstall slurmtrain', or 'pip install -e .' in its sources)"
    )
