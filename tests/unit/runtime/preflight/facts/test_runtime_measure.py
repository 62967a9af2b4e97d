"""What a node measures of itself."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import slurmtrain
from slurmtrain.model.experiment.kinds import Section, keys_of
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.resources import ResourcesSpec
from slurmtrain.model.experiment.sections import PreflightSpec
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.preflight import checks
from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.runtime.preflight.facts import gpus, measure, network_plugins
from slurmtrain.runtime.preflight.facts.measure import NodeContext, measure_all, remove_shared_file

TOKEN = "5eed" * 16
OWN = {"shared", "versions", "gpu", "hardware", "disk", "tmp", "shm", "limits", "dns", "straggler", "environment"}
# A run that measures nothing but what a test switches on.
QUIET = {name: {"level": "off"} for name in OWN}

MakeContext = Callable[..., NodeContext]


@pytest.fixture
def make_context(tmp_path: Path) -> MakeContext:
    """A node of an attempt in a directory of this test. ``preflight``: sections by name; ``gpus``: GPUs a node."""

    def make(*, preflight: Mapping[str, Any] | None = None, gpus: int = 0, **changes: Any) -> NodeContext:
        base = PreflightSpec()
        changed = {
            name: replace(getattr(base, name), **value) if isinstance(value, dict) and name != "plugins" else value
            for name, value in (preflight or {}).items()
        }
        attempt = RunsRoot(tmp_path).run("r").attempt("7", 0)
        attempt.path.mkdir(parents=True, exist_ok=True)
        spec = Spec(preflight=replace(base, **changed), resources=ResourcesSpec(gpus_per_node=gpus), params={"lr": 0.1})
        values: dict[str, Any] = {
            "node": 0,
            "nodes": 1,
            "host": "node0",
            "executor": "slurm",
            "attempt": attempt,
            "plan": Plan(spec=spec, workdir="/", python=sys.executable, template={}),
            "addresses": ["127.0.0.1"],
            "token": TOKEN,
            "environ": {"TMPDIR": str(tmp_path)},
        }
        return NodeContext(**{**values, **changes})

    return make


def only_checks(*checks: str, **more: Any) -> dict[str, Any]:
    """Sections of a preflight in which these checks alone are on."""
    return {**QUIET, **{check: {} for check in checks}, **more}


@pytest.fixture
def hanging() -> Iterator[Callable[..., Any]]:
    """A function that hangs until the test is over."""
    over = threading.Event()

    def hang(*_: object, **__: object) -> dict[str, Any]:
        over.wait(60)
        return {}

    yield hang
    over.set()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take no measure that ends by itself for one that hangs, however long a busy disk or machine keeps it."""
    monkeypatch.setattr(measure, "_GRACE_S", 60.0)


# --- all of them ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("patient")
def test_a_single_node_measures_every_check_and_what_is_measured_can_be_judged(make_context: MakeContext) -> None:
    node = make_context(preflight={"limits": {"min_nofile": 1}})
    facts = measure_all(node)
    assert facts.keys() == OWN
    assert {name for name, of_check in facts.items() if of_check.keys() & {"error", "timeout"}} == set()
    assert {name for name, of_check in facts.items() if "skip" in of_check} == {"gpu", "hardware", "straggler"}
    assert json.loads(json.dumps(facts)) == facts
    findings = checks.judge_checks({0: facts}, node.plan.spec, {0: "node0"})[0]
    assert [finding.check for finding in findings] == [
        name for name, key in keys_of(PreflightSpec).items() if isinstance(key.kind, Section) and name in OWN
    ]  # fmt: skip
    assert [finding.summary for finding in findings if "cannot be judged" in finding.summary] == []


def test_a_check_that_hangs_is_a_timeout_and_does_not_delay_the_others(
    make_context: MakeContext, hanging: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", hanging)
    facts = measure_all(make_context(preflight=only_checks("disk", "limits", timeout_s=1.0)))
    assert facts["disk"] == {"timeout": 1.0}
    assert "nofile" in facts["limits"]


def test_a_check_that_hangs_does_not_keep_the_program_from_ending() -> None:
    program = """
import os, sys, threading
from slurmtrain.runtime.preflight.facts.measure import _ParallelMeasurements
measurements = _ParallelMeasurements()
measurements.start("hangs", threading.Event().wait, 0.1)
print(measurements.facts())
"""
    opened = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert opened.stdout == "{'hangs': {'timeout': 0.1}}\n"


@pytest.mark.parametrize("error", [RuntimeError("no\nway"), SystemExit(3), KeyboardInterrupt()])
def test_a_check_that_raises_is_an_error(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(measure, "describe_obsolete", fail)
    facts = measure_all(make_context(preflight=only_checks("environment")))
    assert facts["environment"] == {"error": f"{type(error).__name__}: {error}"}


# --- shared -----------------------------------------------------------------------------------------------------


def test_all_nodes_read_what_node_0_wrote(make_context: MakeContext) -> None:
    nodes = [make_context(preflight=only_checks("shared"), node=node, nodes=3) for node in range(3)]
    facts: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda n=n: facts.update({n.node: measure_all(n)["shared"]})) for n in nodes]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    assert facts[0].keys() == {"write_ms", "read_ms"}
    assert facts[1].keys() == facts[2].keys() == {"read_ms"}


def test_what_is_written_is_private_and_removed_once_all_have_read_it(make_context: MakeContext) -> None:
    node = make_context(preflight=only_checks("shared"))
    assert measure_all(node)["shared"].keys() == {"write_ms", "read_ms"}
    (written,) = node.attempt.path.iterdir()
    assert written.stat().st_mode & 0o777 == 0o600
    assert TOKEN not in written.name + written.read_text()
    remove_shared_file(node)
    assert list(node.attempt.path.iterdir()) == []
    remove_shared_file(node)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("different", ["directory", "attempt", "content"])
def test_a_node_does_not_see_a_file_elsewhere_of_another_attempt_or_with_other_content(
    make_context: MakeContext, tmp_path: Path, different: str
) -> None:
    preflight = only_checks("shared", timeout_s=60.0, shared={"timeout_s": 0.3})
    first = make_context(preflight=preflight, nodes=2, token="another" if different == "attempt" else TOKEN)
    measure_all(first)
    attempt = first.attempt
    if different == "directory":
        attempt = RunsRoot(tmp_path / "elsewhere").run("r").attempt("7", 0)
        attempt.path.mkdir(parents=True)
    elif different == "content":
        (written,) = attempt.path.iterdir()
        written.write_text(written.read_text()[:-1])
    assert measure_all(make_context(preflight=preflight, node=1, nodes=2, attempt=attempt))["shared"] == {
        "unseen": True
    }
    assert len(list(attempt.path.iterdir())) == (different != "directory")


def test_the_directory_is_opened_before_each_read_to_refresh_the_cache_of_nfs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    really_open = os.open

    def note_open(path: Path, flags: int) -> int:
        opened.append(path)
        return really_open(path, flags)

    monkeypatch.setattr(os, "open", note_open)
    monkeypatch.setattr(Path, "read_bytes", lambda path: opened.append("read") or b"")
    assert not measure._wait_for_content(tmp_path / "file", b"content", time.monotonic())
    assert opened == [tmp_path, "read"]


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_cannot_write_reports_so_at_once(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch, node: int
) -> None:
    def refuse(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(measure, "write_atomically", refuse)
    facts = measure_all(make_context(preflight=only_checks("shared"), node=node, nodes=2))["shared"]
    assert facts == {"refused": "no space left on the device"}


def test_a_shared_directory_that_hangs_is_a_timeout_after_its_own_limit(
    make_context: MakeContext, hanging: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "write_atomically", hanging)
    began = time.monotonic()
    facts = measure_all(make_context(preflight=only_checks("shared", timeout_s=50.0, shared={"timeout_s": 0.2})))
    assert facts["shared"] == {"timeout": 0.2}
    assert time.monotonic() - began < 50


# --- what a node has --------------------------------------------------------------------------------------------


def test_versions_are_those_of_what_runs(make_context: MakeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = measure_all(make_context(preflight=only_checks("versions")))["versions"]
    assert facts["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert (facts["torch"], facts["slurmtrain"]) == (torch.__version__, slurmtrain.__version__)
    assert facts.keys() == {"python", "torch", "cuda", "nccl", "driver", "slurmtrain"}
    monkeypatch.setattr(gpus, "load_nvml", lambda: "nvml")
    monkeypatch.setattr(gpus, "driver_version", lambda nvml: f"570 by {nvml}")
    versions = {"torch": "2.13.0+cu128", "cuda": "12.8", "nccl": "2.28.3"}
    monkeypatch.setattr(measure, "torch_versions", lambda: versions)
    facts = measure_all(make_context(preflight=only_checks("versions"), gpus=2))["versions"]
    assert (facts["cuda"], facts["nccl"], facts["driver"]) == ("12.8", "2.28.3", "570 by nvml")


def test_free_space_is_what_an_ordinary_user_may_use(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = []
    filesystem = SimpleNamespace(f_bavail=100, f_bfree=999, f_frsize=4096, f_favail=7, f_ffree=99, f_files=1000)
    monkeypatch.setattr(os, "statvfs", lambda path: paths.append(str(path)) or filesystem)
    node = make_context(preflight=only_checks("disk", "tmp", "shm"))
    facts = measure_all(node)
    assert {name: facts[name]["path"] for name in ("disk", "tmp", "shm")} == {
        "disk": str(node.attempt.run.path), "tmp": node.environ["TMPDIR"], "shm": "/dev/shm",
    }  # fmt: skip
    assert sorted(paths) == sorted(facts[name]["path"] for name in ("disk", "tmp", "shm"))
    assert (facts["disk"]["free"], facts["disk"]["inodes"], facts["disk"]["writable"]) == (409600, 7, True)
    # One that counts no inodes has none to run out of.
    filesystem.f_favail = filesystem.f_files = 0
    assert measure_all(make_context(preflight=only_checks("disk")))["disk"]["inodes"] is None


def test_the_temporary_directory_is_the_usual_one_without_a_variable_and_may_be_missing(
    make_context: MakeContext, tmp_path: Path
) -> None:
    assert measure_all(make_context(preflight=only_checks("tmp"), environ={}))["tmp"]["path"] == "/tmp"
    gone = str(tmp_path / "gone")
    facts = measure_all(make_context(preflight=only_checks("tmp"), environ={"TMPDIR": gone}))
    assert facts["tmp"] == {"path": gone, "missing": True}


@pytest.mark.parametrize(("soft", "expected"), [(1024, 1024), (resource.RLIM_INFINITY, None)])
def test_limits_are_those_that_hold_now(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, soft: int, expected: int | None
) -> None:
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(measure, "_RDMA", tmp_path / "infiniband")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, resource.RLIM_INFINITY))
    monkeypatch.setattr(measure, "soft_limit_of_ranks", lambda: soft)
    facts = measure_all(make_context(preflight=only_checks("limits")))["limits"]
    assert facts == {"nofile": expected, "memlock": expected, "rdma": ["mlx5_0"]}
    monkeypatch.setattr(measure, "_RDMA", tmp_path / "none")
    assert measure_all(make_context(preflight=only_checks("limits")))["limits"]["rdma"] == []


@pytest.mark.usefixtures("patient")
def test_all_addresses_are_looked_up_side_by_side(make_context: MakeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = threading.Barrier(2)

    def look_up(where: tuple[str, int], flags: int) -> tuple[str, str]:
        assert not flags & socket.NI_NUMERICHOST
        barrier.wait(30)
        if where[0] == "10.1.0.5":
            raise socket.gaierror("no name")
        return "node0", "0"

    monkeypatch.setattr(socket, "getnameinfo", look_up)
    facts = measure_all(make_context(preflight=only_checks("dns"), addresses=["10.0.0.5", "10.1.0.5"]))["dns"]
    assert facts.keys() == {"10.0.0.5", "10.1.0.5"}
    assert min(facts.values()) >= 0
    facts = measure_all(make_context(preflight=only_checks("dns"), addresses=[]))
    assert facts["dns"] == {"skip": "this node uses no network"}


def test_the_environment_of_the_ranks_is_checked(make_context: MakeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "describe_obsolete", lambda environ: sorted(environ))
    facts = measure_all(make_context(preflight=only_checks("environment"), environ={"A": "1"}))
    assert facts["environment"] == {"said": ["A"]}


# --- GPUs and stragglers ----------------------------------------------------------------------------------------


@pytest.fixture
def gpu_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Stand in for the look at two GPUs, and note how often it is made."""
    calls: list[tuple[Any, ...]] = []

    def inspect(*arguments: Any) -> dict[str, Any]:
        calls.append(arguments)
        return {"gemm": {"gpus": [{"gpu": 0, "ms": 0.2}, {"gpu": 1, "ms": 0.5}, {"gpu": 2, "error": "no"}]}}

    monkeypatch.setattr(gpus, "inspect_gpus", inspect)
    monkeypatch.setattr(gpus, "load_nvml", lambda: None)
    return calls


def test_gpus_are_inspected_once_for_both_checks(make_context: MakeContext, gpu_calls: list[tuple[Any, ...]]) -> None:
    node = make_context(preflight=only_checks("gpu", "straggler", timeout_s=20.0), gpus=2, nodes=2)
    facts = measure_all(node)
    assert gpu_calls == [(2, node.environ, 18.0, None)]
    assert facts["gpu"]["gemm"]["gpus"][0] == {"gpu": 0, "ms": 0.2}
    assert facts["straggler"] == {"seconds": 0.0005}


@pytest.mark.parametrize(
    "gpu_facts", [{"skip": "no"}, {"gemm": {"error": "no"}}, {"gemm": {"gpus": [{"error": "no"}]}}]
)
def test_without_a_gpu_that_has_multiplied_there_is_no_time(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch, gpu_facts: dict[str, Any]
) -> None:
    monkeypatch.setattr(gpus, "inspect_gpus", lambda *_: gpu_facts)
    facts = measure_all(make_context(preflight=only_checks("straggler"), gpus=2, nodes=2))
    assert facts["straggler"] == {"skip": "no GPU finished a matrix product"}


def test_without_gpus_a_cpu_core_is_timed(make_context: MakeContext, gpu_calls: list[tuple[Any, ...]]) -> None:
    facts = measure_all(make_context(preflight=only_checks("gpu", "straggler"), nodes=2))
    assert gpu_calls == []
    assert facts["gpu"] == {"skip": "no GPUs requested"}
    assert facts["straggler"]["seconds"] > 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"nodes": 1}, "there is one node only"),
        ({"nodes": 2, "executor": "local"}, "the nodes of a local run are one machine"),
    ],
)
def test_nodes_that_cannot_be_compared_are_not_timed(
    make_context: MakeContext, changes: dict[str, Any], reason: str
) -> None:
    assert measure_all(make_context(preflight=only_checks("straggler"), **changes))["straggler"] == {"skip": reason}


# --- plug-ins ---------------------------------------------------------------------------------------------------


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Offer these functions as plug-ins, by name."""

    def put(**functions: Callable[[Any], Any]) -> None:
        points = [
            SimpleNamespace(name=name, value=f"site:{name}", dist=SimpleNamespace(name="site"), load=lambda f=f: f)
            for name, f in functions.items()
        ]
        monkeypatch.setattr(network_plugins, "entry_points", lambda group: points)

    return put


def test_a_plug_in_is_a_check_of_its_own(make_context: MakeContext, offer: Callable[..., None]) -> None:
    arguments = []

    def check(node: Any) -> tuple[str, str]:
        arguments.append(replace(node, params=dict(node.params)))
        node.params.update(lr=9)
        return "pass", "3 left"

    offer(licence=check)
    node = make_context(preflight=only_checks(), node=1, nodes=2, gpus=4)
    assert measure_all(node) == {"licence": {"status": "pass", "summary": "3 left", "evidence": {}}}
    facts = arguments[0]
    assert (facts.index, facts.nodes, facts.host, facts.executor) == (1, 2, "node0", "slurm")
    assert (facts.run_dir, facts.params, facts.gpus_per_node) == (node.attempt.run.path, {"lr": 0.1}, 4)
    # It has changed a copy of its own.
    assert node.plan.spec.params == {"lr": 0.1}


def test_a_plug_in_that_raises_or_hangs_delays_no_other(
    make_context: MakeContext, offer: Callable[..., None], hanging: Callable[..., Any]
) -> None:
    offer(bad=lambda node: {}["x"], slow=hanging, good=lambda node: ("pass", "well"), exits=lambda node: sys.exit(1))
    facts = measure_all(make_context(preflight=only_checks(timeout_s=1.0)))
    assert facts == {
        "bad": {"error": "KeyError: 'x'"},
        "slow": {"timeout": 1.0},
        "good": {"status": "pass", "summary": "well", "evidence": {}},
        "exits": {"error": "SystemExit: 1"},
    }


def test_a_plug_in_cannot_take_the_place_of_a_check_of_slurmtrains_own(
    make_context: MakeContext, offer: Callable[..., None]
) -> None:
    for name in PreflightSpec.__dataclass_fields__:
        offer(**{name: lambda node: ("pass", "trust me")})
        sentences = f"the entry point {name!r} of site has the name of a check of slurmtrain's own"
        assert measure_all(make_context(preflight=only_checks())) == {"plugins": {"error": sentences}}


def test_a_search_for_plug_ins_that_hangs_is_a_timeout(
    make_context: MakeContext, hanging: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_plugins, "entry_points", hanging)
    assert measure_all(make_context(preflight=only_checks(timeout_s=1.0))) == {"plugins": {"timeout": 1.0}}
