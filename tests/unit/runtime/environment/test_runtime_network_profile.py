"""The network profiles that are shipped, and what becomes of one that is missing or wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from slurmtrain.errors import SlurmtrainError
from slurmtrain.model.preflight.obsolete_variables import describe_obsolete
from slurmtrain.model.spec.spec import NETWORK_PROFILES
from slurmtrain.runtime.environment.ranks import Profile, load_profile
from slurmtrain.system import templates

FOLDER = templates.directory() / "network"
PAGE = (Path(__file__).resolve().parents[4] / "docs" / "network-profiles.md").read_text()
GOOD = (
    'about: One.\nvariables: {NCCL_NET: {value: IB, why: Because.}, A_B2: {value: "1", why: So.}}\nsetup: ["a", "b"]\n'
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of profiles in place of the one that is shipped."""
    monkeypatch.setattr(templates, "directory", lambda: tmp_path)
    (tmp_path / "network").mkdir()
    return tmp_path / "network"


def section(name: str) -> str:
    """What the page for users has on a profile."""
    section = re.search(rf"^## {name}\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    assert section is not None
    return section[1]


def test_there_is_a_profile_for_each_name_that_a_spec_may_give_and_no_other() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {f"{name}.yaml" for name in NETWORK_PROFILES}


@pytest.mark.parametrize("name", NETWORK_PROFILES)
def test_each_profile_has_a_reason_for_each_variable_and_stands_in_the_page(name: str) -> None:
    profile = load_profile(name)
    text = (FOLDER / f"{name}.yaml").read_text()
    assert text.startswith("# Sources: ")
    source = yaml.safe_load(text)
    rows = re.findall(r"^\| `([A-Z0-9_]+)` \| `(.*?)` \| (.+) \|$", section(name), re.MULTILINE)
    assert {variable: value for variable, value, _ in rows} == dict(profile.variables)
    assert profile.about.endswith(".")
    assert all(entry["why"].strip().endswith(".") for entry in source["variables"].values())
    assert describe_obsolete(profile.variables) == []


def test_a_profile_is_read_as_it_is_written(folder: Path) -> None:
    (folder / "own.yaml").write_text(GOOD)
    assert load_profile("own") == Profile("own", "One.", {"NCCL_NET": "IB", "A_B2": "1"}, ("a", "b"))
    (folder / "bare.yaml").write_text("about: One.\nvariables: {}\n")
    assert load_profile("bare") == Profile("bare", "One.", {}, ())


@pytest.mark.parametrize("name", ["token-ring", "../network/tcp", "", "tcp.yaml"])
def test_a_name_without_a_profile_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(SlurmtrainError) as raised:
        load_profile(name)
    assert repr(name) in str(raised.value)
    assert "efa, gcp, infiniband, roce, tcp" in str(raised.value)


def test_where_the_profiles_are_missing_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "directory", lambda: tmp_path / "gone")
    with pytest.raises(SlurmtrainError, match=r"no network profile 'tcp' in .*gone.*; profiles there: none"):
        load_profile("tcp")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not a mapping"),
        ("about: [", "while parsing"),
        ("- about", "not a mapping"),
        ("variables: {}", "about is None"),
        ("{about: '', variables: {}}", "about is ''"),
        ("about: One.", "variables is not a mapping"),
        ("{about: One., variables: []}", "variables is not a mapping"),
        ("{about: One., variables: {}, more: 1, extra: 1}", "extra, more: a profile has"),
        ("{about: One., variables: {a-b: {value: x, why: y}}}", "'a-b' cannot name a variable"),
        ("{about: One., variables: {1: {value: x, why: y}}}", "1 cannot name a variable"),
        ("{about: One., variables: {A: x}}", "variables.A must have exactly a value and a why"),
        ("{about: One., variables: {A: {value: x}}}", "variables.A must have exactly a value and a why"),
        ("{about: One., variables: {A: {value: x, why: ' '}}}", "variables.A.why is ' '"),
        ("{about: One., variables: {A: {value: 1, why: y}}}", "variables.A.value is 1, not a line of text"),
        ('{about: One., variables: {A: {value: "a\\nb", why: y}}}', "variables.A.value"),
        ("{about: One., variables: {}, setup: echo}", "setup is not a list"),
        ("{about: One., variables: {}, setup: [a, {b: c}]}", "setup.1 is {'b': 'c'}"),
        ("{about: !!python/name:os.system , variables: {}}", "could not determine a constructor"),
    ],
)
def test_a_profile_that_is_wrong_is_refused_with_its_file_and_what_is_wrong(
    folder: Path, text: str, problem: str
) -> None:
    (folder / "own.yaml").write_text(text)
    with pytest.raises(SlurmtrainError) as raised:
        load_profile("own")
    assert str(raised.value).startswith(f"{folder / 'own.yaml'} is not a network profile: ")
    assert problem in str(raised.value)


def test_a_profile_that_cannot_be_read_is_told_with_the_reason(folder: Path) -> None:
    (folder / "own.yaml").mkdir()
    with pytest.raises(SlurmtrainError, match="cannot read the network profile"):
        load_profile("own")
    (folder / "binary.yaml").write_bytes(b"about: \xff")
    with pytest.raises(SlurmtrainError, match="is not a network profile"):
        load_profile("binary")


def test_importing_the_module_does_not_import_yaml() -> None:
    code = "import sys, slurmtrain.runtime.environment.ranks; sys.exit('yaml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("inside", [True, False])
def test_templates_are_in_the_package_of_a_wheel_and_beside_that_of_a_checkout(
    inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "slurmtrain" / "templates" if inside else tmp_path / "templates"
    directory.mkdir(parents=True)
    monkeypatch.setattr(templates, "__file__", str(tmp_path / "slurmtrain" / "system" / "templates.py"))
    assert templates.directory() == directory


# --- Google's scripts, in directories of the test -----------------------------------------------------------------


def run_setup(root: Path) -> subprocess.CompletedProcess[str]:
    """The lines of gcp's setup, with Google's directories below this one, and then what they have exported."""
    lines = [
        line.replace("/usr/local/gib", f"{root}/gib").replace("/var/lib", f"{root}/var")
        for line in load_profile("gcp").setup
    ]
    script = "\n".join(["set -eu", *lines, "env"])
    return subprocess.run(
        ["bash", "-c", script], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60, check=True
    )


def install(root: Path, path: str, text: str) -> None:
    script = root / path
    script.parent.mkdir(parents=True)
    script.write_text(text)


@pytest.mark.parametrize("place", ["gib", "var/gib"])
def test_where_gib_is_installed_its_script_and_its_libraries_are_used(place: str, tmp_path: Path) -> None:
    install(tmp_path, f"{place}/scripts/set_nccl_env.sh", "export NCCL_IB_TC=52\n")
    shell = run_setup(tmp_path)
    exported = dict(line.split("=", 1) for line in shell.stdout.splitlines())
    assert exported["NCCL_IB_TC"] == "52"
    assert exported["NCCL_NET"] == "gIB"
    assert exported["LD_LIBRARY_PATH"] == f"{tmp_path}/{place}/lib64"
    assert shell.stderr == ""


def test_where_tcpxo_is_installed_its_script_is_told_where_it_lies(tmp_path: Path) -> None:
    install(tmp_path, "var/tcpxo/lib64/nccl-env-profile.sh", 'export NCCL_TUNER_CONFIG_PATH="$NCCL_LIB_DIR/tuner"\n')
    shell = run_setup(tmp_path)
    exported = dict(line.split("=", 1) for line in shell.stdout.splitlines())
    assert exported["NCCL_TUNER_CONFIG_PATH"] == f"{tmp_path}/var/tcpxo/lib64/tuner"
    assert exported["LD_LIBRARY_PATH"] == f"{tmp_path}/var/tcpxo/lib64"
    assert "NCCL_NET" not in exported
    assert shell.stderr == ""


def test_where_neither_is_installed_the_log_says_that_nccl_will_use_tcp(tmp_path: Path) -> None:
    shell = run_setup(tmp_path)
    assert "NCCL will use TCP" in shell.stderr
    assert "NCCL" not in shell.stdout
