"""A real Slurm cluster on this machine, and an ordinary user of it."""

from __future__ import annotations

import compileall
import contextlib
import fcntl
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helpers.site import PATIENCE_S, SCRIPTS, Site, end_servers, until

REPOSITORY = Path(__file__).resolve().parents[2]
# Concurrent test sessions each have their own cluster and user.
NAME = f"slurmtrain-test{os.environ.get('PYTEST_XDIST_WORKER', '').replace('gw', '-')}"
USER = NAME
NODES = 4
GPUS = 2
GRACE_S = 10
# The version of Slurm, one of scripts/cluster's; empty: that of this machine.
SLURM = os.environ.get("TEST_SLURM", "")
# Exit code of scripts/cluster if a machine cannot host a cluster at all.
CANNOT = 3


class Cluster:
    """The cluster that ``scripts/cluster`` creates for one test session."""

    def __init__(self, name: str = NAME, slurm: str = SLURM) -> None:
        """``slurm``: the version of its Slurm; empty: that of this machine."""
        self.name = name
        self.own_slurm = slurm
        self.conf = ""
        self.programs = "/usr/bin"
        """Where Slurm's commands are."""

    def script(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run ``scripts/cluster``."""
        completed = subprocess.run(
            ["/usr/bin/env", "python3", str(REPOSITORY / "scripts" / "cluster"), *arguments, "--name", self.name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert not check or completed.returncode == 0, (
            f"cluster {arguments}: {completed.returncode}\n{completed.stdout}{completed.stderr}"
        )
        return completed

    def up(self) -> None:
        """Start it, or skip with the reason why this machine cannot have one."""
        size = ("--nodes", str(NODES), "--gpus", str(GPUS), "--grace", str(GRACE_S))
        own = ("--slurm", self.own_slurm) if self.own_slurm else ()
        completed = self.script("up", *size, *own, "--user", USER, check=False)
        if completed.returncode == CANNOT:
            pytest.skip(f"no Slurm cluster here: {completed.stderr.strip().splitlines()[-1]}")
        assert completed.returncode == 0, completed.stdout + completed.stderr
        exported = dict(line.removeprefix("export ").split("=", 1) for line in self.script("env").stdout.splitlines())
        self.conf = exported["SLURM_CONF"].strip("'")
        self.programs = exported.get("PATH", self.programs).partition(":")[0].strip("'")

    def slurm(self, *command: str, check: bool = True) -> str:
        """Run one of Slurm's commands as root."""
        path = f"{self.programs}:{os.environ['PATH']}"
        environ = {**os.environ, "PATH": path, "SLURM_CONF": self.conf, "SLURM_TIME_FORMAT": "%s"}
        completed = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S)
        assert not check or completed.returncode == 0, f"{command}: {completed.stderr}"
        return completed.stdout

    @property
    def controller_address(self) -> str:
        """The address of this machine that the nodes can reach."""
        line = re.search(r"^SlurmctldHost=[^(]*\(([0-9.]+)\)", Path(self.conf).read_text(), re.MULTILINE)
        assert line is not None
        return line[1]

    def jobs(self, *states: str) -> dict[str, str]:
        """Names of all jobs in these states, by id; by default of those that have not ended."""
        chosen = ",".join(states) or "PENDING,RUNNING,COMPLETING,SUSPENDED,CONFIGURING"
        lines = self.slurm("squeue", "--noheader", f"--states={chosen}", "--format=%i|%j").splitlines()
        return dict(line.split("|", 1) for line in lines)

    def state(self, job_id: str) -> str:
        """What squeue says about a job right now."""
        return self.slurm("squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T").strip()

    def restarts(self, job_id: str) -> int:
        """How often Slurm has started a job again."""
        shown = self.slurm("scontrol", "show", "job", job_id)
        return int(next(word.partition("=")[2] for word in shown.split() if word.startswith("Restarts=")))

    def version(self) -> tuple[int, int]:
        """That of its Slurm, such as (22, 5)."""
        year, month = re.findall(r"\d+", self.slurm("scontrol", "--version"))[:2]
        return int(year), int(month)

    @contextlib.contextmanager
    def configured(self, setting: str) -> Iterator[None]:
        """Within this context slurm.conf has another line."""
        conf = Path(self.conf)
        before = conf.read_text()
        try:
            self._reconfigure(conf, f"{before}{setting}\n")
            yield
        finally:
            self._reconfigure(conf, before)

    def _reconfigure(self, conf: Path, text: str) -> None:
        # At once: nodes may still be reading the file because of the last change, and end if they find half of it.
        draft = conf.with_name(f".{conf.name}.new")
        draft.write_text(text)
        shutil.copymode(conf, draft)
        draft.replace(conf)
        self.slurm("scontrol", "reconfigure")

    def pids(self, node: int) -> list[int]:
        """Processes on a node."""
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        # Unrelated processes come and go.
        own = re.compile(rf"{self.name}-[0-9a-f]+-node{node}")
        names = [name for line in listed.splitlines() if own.fullmatch(name := line.split()[0])]
        for name in names:
            pids = [
                int(pid)
                for pid in subprocess.run(
                    ["ip", "netns", "pids", name], capture_output=True, text=True, check=True
                ).stdout.split()
            ]
            if any(self._is_mine(pid) for pid in pids):
                return pids
        raise AssertionError(f"no namespace of node {node} in {names}")

    def _is_mine(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            return (
                self.conf.encode()
                in Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
            )
        return False

    def daemon(self, name: str) -> int:
        """The pid of a daemon of this cluster that runs outside its nodes."""
        for path in Path("/proc").glob("[0-9]*/comm"):
            with contextlib.suppress(OSError):
                if path.read_text().strip() == name and self._is_mine(int(path.parent.name)):
                    return int(path.parent.name)
        raise AssertionError(f"there is no {name}")

    def kill_controller(self, job_id: str) -> None:
        """SIGKILL slurmctld as soon as it has saved to disk that this job runs.

        Otherwise a restarted slurmctld would start the job again on the node where it runs already, and drain that
        node: "Duplicate jobid". Any change of a job makes slurmctld save its state within seconds.
        """
        words = dict(line.partition("=")[::2] for line in Path(self.conf).read_text().splitlines())
        saved = Path(words["StateSaveLocation"], "job_state")
        before = saved.stat().st_mtime_ns if saved.exists() else 0
        self.slurm("scontrol", "update", f"JobId={job_id}", "Comment=saved")
        until(lambda: saved.exists() and saved.stat().st_mtime_ns > before, "the state of the jobs on disk")
        os.kill(self.daemon("slurmctld"), signal.SIGKILL)

    def kill_all_of(self, uid: int, node: int) -> None:
        """SIGKILL every process of a user on a node."""
        pids = self.pids(node)
        # None of them may see another one die and report it.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(OSError):
                    if Path(f"/proc/{pid}").stat().st_uid == uid:
                        os.kill(pid, number)

    def slurmd(self, node: int) -> int:
        """The pid of a node's slurmd."""
        for pid in self.pids(node):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == "slurmd":
                    return pid
        raise AssertionError(f"there is no slurmd on node{node}")

    def hide(self, path: Path, node: int) -> None:
        """Make a directory look empty on one node, as if it were not shared, until the node is restarted."""
        nsenter = ["nsenter", f"--mount=/proc/{self.slurmd(node)}/ns/mnt"]
        subprocess.run([*nsenter, "mount", "-t", "tmpfs", "-o", "mode=755", "none", str(path)], check=True)

    def unhide(self, path: Path, node: int) -> None:
        """Undo :meth:`hide`."""
        subprocess.run(["nsenter", f"--mount=/proc/{self.slurmd(node)}/ns/mnt", "umount", str(path)], check=True)

    def namespace(self, node: int) -> str:
        """The network namespace of a node."""
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        [name] = [
            n
            for line in listed.splitlines()
            if re.fullmatch(rf"{self.name}-[0-9a-f]+-node{node}", n := line.split()[0])
        ]
        return name

    def inside(self, node: int, *command: str) -> str:
        """Run a command in a node's network namespace."""
        argv = ["ip", "netns", "exec", self.namespace(node), *command]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout

    def sent(self, node: int) -> dict[str, int]:
        """Bytes sent by a node, by interface."""
        links = json.loads(self.inside(node, "ip", "-j", "-s", "link"))
        return {link["ifname"]: int(link["stats64"]["tx"]["bytes"]) for link in links}

    @contextlib.contextmanager
    def broken_network(self, node: int, interface: str, *options: str) -> Iterator[None]:
        """Within this context an interface of a node stays up but drops its traffic."""
        self.script("break-network", str(node), interface, *options)
        try:
            yield
        finally:
            self.script("mend-network", str(node))

    @contextlib.contextmanager
    def wrong_clock(self, node: int, seconds: float) -> Iterator[None]:
        """Within this context, tasks that start on a node see a wrong clock."""
        self.script("shift-clock", str(node), str(seconds))
        try:
            yield
        finally:
            self.script("shift-clock", str(node), "0")

    @contextlib.contextmanager
    def no_names(self) -> Iterator[None]:
        """Within this context no node can resolve any name: hosts files are empty, and no DNS server answers."""
        files = {"hosts": "", "nsswitch.conf": "hosts: files dns\npasswd: files\ngroup: files\n",
                 "resolv.conf": "nameserver 10.57.255.253\n"}  # fmt: skip
        places = [Path("/etc/netns", self.namespace(node), name) for node in range(NODES) for name in files]
        before = {place: place.read_text() for place in places}
        try:
            for place in places:
                place.write_text(files[place.name])  # in place: it is mounted over the nodes' own
            yield
        finally:
            for place, text in before.items():
                place.write_text(text)

    def quiet(self) -> None:
        """End all jobs, and wait until every node is idle."""
        self.slurm("scancel", "--state=PENDING", f"--user={USER}")
        self.slurm("scancel", f"--user={USER}")
        self.slurm("scancel", "--user=root")
        until(lambda: not self.jobs(), "the end of all jobs")
        until(self._all_idle, "all nodes idle")

    def _all_idle(self) -> bool:
        states = self.slurm("sinfo", "--noheader", "--Node", "--partition=spot", "--format=%T").split()
        return states == ["idle"] * NODES


@dataclass(frozen=True)
class Person:
    """An ordinary user, with a directory and a Python that the nodes can also read."""

    name: str
    home: Path
    python: Path
    code: Path

    @property
    def uid(self) -> int:
        return pwd.getpwnam(self.name).pw_uid

    @property
    def gid(self) -> int:
        return pwd.getpwnam(self.name).pw_gid


class ClusterSite(Site):
    """A directory on the cluster in which to call slurmtrain as an ordinary user would."""

    def __init__(self, path: Path, cluster: Cluster, person: Person) -> None:
        super().__init__(path)
        self.cluster = cluster
        self.person = person
        self.python = str(person.python)
        self.scripts = person.code / "scripts"
        self.identity = {"user": person.uid, "group": person.gid, "extra_groups": []}

    def environment(self) -> dict[str, str]:
        passed_on = ("LANG", "LC_ALL", "TERM", "OPENBLAS_NUM_THREADS")
        inherited = {name: os.environ[name] for name in passed_on if name in os.environ}
        return {
            **inherited,
            "HOME": str(self.person.home),
            "USER": self.person.name,
            "LOGNAME": self.person.name,
            "PATH": f"{self.person.python.parent}:{self.cluster.programs}:/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": str(self.person.code),
            "SLURM_CONF": self.cluster.conf,
            "SLURMTRAIN_RUNS": str(self.runs),
            "SLURMTRAIN_SLURM_INTERVAL": "10",
        }

    def start(self, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a slurmtrain command whose output can be read."""
        return subprocess.Popen(
            [self.python, "-m", "slurmtrain", *arguments],
            cwd=self.path,
            env={**self.environment(), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **self.identity,
        )

    def submit(self, spec: Path, *arguments: str, **more: Any) -> str:
        """Submit a spec to the cluster; return the run's id."""
        return str(self.json("submit", str(spec), "--executor", "slurm", *arguments, **more)["runs"][0]["id"])

    def job(self, run_id: str) -> str:
        """The id of the run's newest job, from the run's own journals."""
        return str(self.json("status", run_id)["runs"][0]["job_id"])

    def until_step(self, run_id: str, step: int) -> None:
        """Wait until a run has finished this step."""
        until(lambda: self.step(run_id) >= step, f"step {step} of {run_id}")


@contextlib.contextmanager
def ordinary_person() -> Iterator[Person]:
    """Create the user, and a world-readable copy of the code and Python; remove all of it afterwards."""
    base = Path(tempfile.mkdtemp(prefix="slurmtrain-test-", dir="/var/tmp"))
    base.chmod(0o755)
    made_user = _make_user(base / "home")
    try:
        code = _copy_code(base / "code")
        with _public_python(base, code) as python:
            yield Person(USER, base / "home", python, code)
            end_servers()
    finally:
        shutil.rmtree(base, ignore_errors=True)
        if made_user:
            _change_users("userdel", USER)


def _make_user(home: Path) -> bool:
    try:
        pwd.getpwnam(USER)
        new = False
    except KeyError:
        _change_users("useradd", "--no-create-home", "--home-dir", str(home), USER)
        new = True
    home.mkdir()
    entry = pwd.getpwnam(USER)
    os.chown(home, entry.pw_uid, entry.pw_gid)
    return new


def _change_users(*command: str) -> None:
    """Change /etc/passwd, whose lock a concurrent test session may hold."""
    with Path("/run/slurmtrain-test-users.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(command, check=True, capture_output=True)


def _copy_code(target: Path) -> Path:
    """Copy the package, templates and scripts, world-readable, and compiled, since an ordinary user cannot do that."""
    for name in ("slurmtrain", "templates", "experiments"):
        # Whatever is compiled here is so there too, since times are copied.
        shutil.copytree(REPOSITORY / name, target / name)
    shutil.copytree(SCRIPTS, target / "scripts")
    compileall.compile_dir(target, quiet=2, workers=1)
    subprocess.run(["chmod", "-R", "go+rX", str(target)], check=True)
    return target


@contextlib.contextmanager
def _public_python(base: Path, code: Path) -> Iterator[Path]:
    """An interpreter with this one's packages that the user may execute: this one, otherwise the distribution's."""
    if _works(Path(sys.executable), code):
        yield Path(sys.executable)
        return
    packages = next(Path(entry) for entry in sys.path if entry.endswith("site-packages"))
    python = _other_python(base / "venv", packages)
    if python is not None and _works(python, code):
        yield python
        return
    place = base / "packages"
    place.mkdir()
    mounted = subprocess.run(["mount", "--bind", str(packages), str(place)], capture_output=True).returncode == 0
    try:
        shutil.rmtree(base / "venv", ignore_errors=True)
        python = _other_python(base / "venv", place) if mounted else None
        if python is None or not _works(python, code):
            pytest.skip(f"an ordinary user cannot execute {sys.executable}, and /usr/bin/python3 is no stand-in for it")
        yield python
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(place)], check=True)


def _other_python(venv: Path, packages: Path) -> Path | None:
    """A virtual environment of the distribution's Python, if of the same version, that uses these packages."""
    ask = ["/usr/bin/python3", "-c", "import sys; print(sys.version_info[:2])"]
    version = subprocess.run(ask, capture_output=True, text=True).stdout.strip()
    if version != str(sys.version_info[:2]):
        return None
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", str(venv)], check=True)
    [own] = venv.glob("lib/python*/site-packages")
    (own / "packages.pth").write_text(f"{packages}\n")
    subprocess.run(["chmod", "-R", "go+rX", str(venv)], check=True)
    return venv / "bin" / "python"


def _works(python: Path, code: Path) -> bool:
    entry = pwd.getpwnam(USER)
    try:
        completed = subprocess.run(
            [str(python), "-c", "import click, submitit, slurmtrain"],
            env={"PYTHONPATH": str(code), "PATH": "/usr/bin:/bin"},
            cwd="/",
            capture_output=True,
            user=entry.pw_uid,
            group=entry.pw_gid,
            extra_groups=[],
        )
    except OSError:
        return False
    return completed.returncode == 0
