"""Slurm as another Debian release has it, beside this machine's own: its packages are unpacked, never installed.

What is unpacked is a file tree with everything that Slurm needs, down to the C library. Slurm's programs in it are
patched to load their libraries from there, so that they run on this machine as they are: jobs see the machine's own
files, users and Python, which they would not in a chroot. The tree is kept, and shared by all clusters.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from .cluster import machine_lock
from .processes import CannotHere, ClusterError, run

# Debian's releases by the version of their Slurm.
RELEASES = {"22.05": "bookworm", "24.11": "trixie"}
CACHE = Path("/var/cache/slurmtrain-cluster")
_MIRROR = "http://deb.debian.org/debian"
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_PACKAGES = (
    "slurmctld", "slurmd", "slurmdbd", "slurm-client", "slurm-wlm-basic-plugins", "slurm-wlm-mysql-plugin",
)  # fmt: skip
# Debian calls some of them slurmd-wlm and so on, and links them when they are installed.
_PROGRAMS = {
    "usr/sbin": ("slurmctld", "slurmd", "slurmstepd", "slurmdbd"),
    "usr/bin": ("sacct", "sacctmgr", "salloc", "sattach", "sbatch", "sbcast", "scancel", "scontrol", "sdiag", "sinfo",
                "sprio", "squeue", "srun", "sshare", "sstat", "strigger"),
}  # fmt: skip


def tree(version: str) -> Path:
    """The tree with this version of Slurm."""
    return CACHE / f"slurm-{version}"


def ensure(version: str) -> Path:
    """Download and unpack this version of Slurm, once; returns its tree. Raises CannotHere."""
    place = tree(version)
    if not place.exists():
        with machine_lock():
            if not place.exists():
                _make(place, RELEASES[version])
    return place


def programs(root: Path) -> dict[str, Path]:
    """Slurm's daemons and commands in a tree, by the names that people type."""
    paths = {}
    for folder, names in _PROGRAMS.items():
        for name in names:
            candidates = [root / folder / f"{name}-wlm", root / folder / name]
            paths[name] = next(path for path in candidates if path.is_file())
    return paths


def plugins(root: Path) -> Path:
    """Where a tree's Slurm has its plugins (PluginDir)."""
    [folder] = root.glob("usr/lib/*/slurm-wlm")
    return folder


def _make(place: Path, release: str) -> None:
    """Make a tree: it gets its name when it is complete."""
    print(f"cluster: downloading Slurm of Debian {release} (once)", file=sys.stderr, flush=True)
    new, downloads = place.with_name(place.name + ".new"), place.with_name(place.name + ".apt")
    for stale in (new, downloads):
        shutil.rmtree(stale, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        for package in _download(downloads, release):
            run(["dpkg-deb", "--extract", package, new], timeout=None)
        _patch(new, place)
    except ClusterError as error:
        raise CannotHere(f"Slurm of Debian {release} cannot be had here: {error}") from None
    shutil.rmtree(downloads)
    new.rename(place)


def _download(folder: Path, release: str) -> list[Path]:
    """The packages and all that they depend on, by an apt that knows this release alone and nothing as installed."""
    if not _KEYRING.exists():
        raise ClusterError(f"there is no {_KEYRING}: install the package debian-archive-keyring")
    for place in ("lists/partial", "archives/partial"):
        (folder / place).mkdir(parents=True)
    (folder / "status").touch()
    (folder / "sources.list").write_text(f"deb [signed-by={_KEYRING}] {_MIRROR} {release} main\n")
    settings = {
        "Dir::Etc::SourceList": folder / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::Etc::Preferences": "/dev/null",
        "Dir::Etc::PreferencesParts": "/dev/null",
        "Dir::State::Lists": folder / "lists",
        "Dir::State::Status": folder / "status",
        "Dir::Cache": folder,
        # The user _apt may not write here.
        "APT::Sandbox::User": "root",
        "APT::Get::Download-Only": "true",
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
    }
    apt = ["apt-get", "--yes", "--no-install-recommends", *(f"-o{name}={value}" for name, value in settings.items())]
    run([*apt, "update"], timeout=None)
    run([*apt, "install", *_PACKAGES], timeout=None)
    return sorted((folder / "archives").glob("*.deb"))


def _patch(new: Path, place: Path) -> None:
    """Have Slurm's programs and plugins load all libraries from the tree, once it has its name."""
    own = plugins(new)
    # Debian has moved them from /lib to /usr/lib.
    libraries = [new / top / own.parent.name for top in ("usr/lib", "lib")]
    search = ":".join(str(place / folder.relative_to(new)) for folder in (own, *libraries))
    [loader] = _files(folder / "ld-linux*.so.*" for folder in libraries)
    # RPATH, which also holds for what the libraries themselves need, other than the newer RUNPATH.
    command = ["patchelf", "--force-rpath", "--set-rpath", search]
    executables = list(programs(new).values())
    run([*command, "--set-interpreter", place / loader.relative_to(new), *executables], timeout=None)
    run([*command, *_files([own / "*.so*"])], timeout=None)


def _files(patterns: Iterable[Path]) -> list[Path]:
    """The files that match, without links, some of which are absolute and lead out of the tree."""
    matches = (path for pattern in patterns for path in sorted(pattern.parent.glob(pattern.name)))
    return [path for path in matches if path.is_file() and not path.is_symlink()]
