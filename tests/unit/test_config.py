"""Settings: which source wins, what paths count from, and mistakes at their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest

from slurmtrain.config import Config, load_config, read_receivers
from slurmtrain.errors import PathError, SpecError
from slurmtrain.model.urls import DatabaseUrl


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory below which nothing is configured; the user's configuration would lie in ``home``."""
    (tmp_path / "home").mkdir()
    (tmp_path / "project" / "deep" / "down").mkdir(parents=True)
    return tmp_path / "project"


def load(project: Path, cwd: Path | None = None, **options: Any) -> Config:
    environ = {"HOME": str(project.parent / "home"), **options.pop("environ", {})}
    return load_config(cwd=cwd or project, environ=environ, **options)


def user_file(project: Path) -> Path:
    path = project.parent / "home" / ".config" / "slurmtrain" / "slurmtrain.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_without_any_configuration_runs_live_in_the_current_directory(project: Path) -> None:
    config = load(project)
    assert config == Config(
        runs=project / "runs", executor=None, registry=project / "runs" / "registry.db", mlflow_uri=None
    )


def test_the_nearest_file_upwards_decides_where_runs_live(project: Path) -> None:
    (project / "slurmtrain.yaml").write_text("")
    assert load(project, project / "deep" / "down").runs == project / "runs"
    (project / "deep" / "slurmtrain.yaml").write_text("executor: local\n")
    config = load(project, project / "deep" / "down")
    assert (config.runs, config.executor) == (project / "deep" / "runs", "local")


def test_paths_in_a_file_count_from_that_files_directory(project: Path) -> None:
    (project / "slurmtrain.yaml").write_text("runs: ../elsewhere\nregistry: db/registry.db\n")
    config = load(project, project / "deep" / "down")
    assert config.runs == project.parent / "elsewhere"
    assert config.registry == project / "db" / "registry.db"


def test_a_project_wins_over_the_user_and_the_user_fills_in_the_rest(project: Path) -> None:
    user_file(project).write_text("executor: slurm\nmlflow_uri: http://user:5000\n")
    (project / "slurmtrain.yaml").write_text("executor: local\nmlflow_uri: null\n")
    config = load(project)
    assert (config.executor, config.mlflow_uri) == ("local", "http://user:5000")


def test_the_users_files_are_found_where_xdg_says(project: Path) -> None:
    folder = project.parent / "xdg" / "slurmtrain"
    folder.mkdir(parents=True)
    (folder / "slurmtrain.yaml").write_text("executor: slurm\n")
    assert load(project, environ={"XDG_CONFIG_HOME": str(folder.parent)}).executor == "slurm"


def test_the_environment_wins_over_files_and_flags_over_the_environment(project: Path) -> None:
    (project / "slurmtrain.yaml").write_text("executor: slurm\nruns: a\nmlflow_uri: http://file\n")
    environ = {"SLURMTRAIN_RUNS": "b", "SLURMTRAIN_EXECUTOR": "local", "SLURMTRAIN_MLFLOW_URI": "http://environment"}
    config = load(project, environ=environ)
    assert (config.runs, config.executor, config.mlflow_uri) == (project / "b", "local", "http://environment")
    config = load(project, environ=environ, runs="c", executor="slurm")
    assert (config.runs, config.executor) == (project / "c", "slurm")


def test_the_registry_lies_in_the_runs_root_wherever_that_is(project: Path) -> None:
    assert load(project, runs="x").registry == project / "x" / "registry.db"
    assert load(project, runs="x", environ={"SLURMTRAIN_REGISTRY": "/db/r.db"}).registry == Path("/db/r.db")


def test_a_registry_without_a_name_is_refused(project: Path) -> None:
    with pytest.raises(PathError, match="the registry cannot be /: it must be a file"):
        load(project, environ={"SLURMTRAIN_REGISTRY": "/"})


def test_an_empty_variable_counts_as_unset(project: Path) -> None:
    assert load(project, environ={"SLURMTRAIN_RUNS": "", "SLURMTRAIN_EXECUTOR": ""}) == load(project)


def test_all_mistakes_of_a_file_are_reported_with_their_lines(project: Path) -> None:
    path = project / "slurmtrain.yaml"
    path.write_text("executer: local\nruns: 5\nexecutor: slrum\n")
    with pytest.raises(SpecError) as raised:
        load(project)
    assert [(one.where, one.key) for one in raised.value.mistakes] == [
        (f"{path}:1", "executer"),
        (f"{path}:2", "runs"),
        (f"{path}:3", "executor"),
    ]
    assert "did you mean 'executor'?" in raised.value.mistakes[0].message
    assert "did you mean 'slurm'?" in raised.value.mistakes[2].message


def test_a_mistake_in_the_environment_names_the_variable(project: Path) -> None:
    with pytest.raises(SpecError, match="the environment variable SLURMTRAIN_EXECUTOR: expected one of local, slurm"):
        load(project, environ={"SLURMTRAIN_EXECUTOR": "cloud"})


@pytest.mark.parametrize("text", ["[a", "- a", "runs: 'x", "\x00"])
def test_a_file_that_is_not_a_mapping_is_refused(project: Path, text: str) -> None:
    (project / "slurmtrain.yaml").write_text(text)
    with pytest.raises(SpecError, match=r"slurmtrain\.yaml:1"):
        load(project)


def test_nodes_are_avoided_for_a_day_or_the_configured_time(project: Path) -> None:
    assert load(project).node_expiry_hours == 24
    assert load(project, environ={"SLURMTRAIN_NODE_EXPIRY_HOURS": "1.5"}).node_expiry_hours == 1.5
    (project / "slurmtrain.yaml").write_text("node_expiry_hours: 0\n")
    assert load(project).node_expiry_hours == 0
    with pytest.raises(SpecError, match="NODE_EXPIRY_HOURS: expected a number of at least 0, found -1"):
        load(project, environ={"SLURMTRAIN_NODE_EXPIRY_HOURS": "-1"})


# --- a registry on a server ------------------------------------------------------------------------------------------


def write_registry(project: Path, value: str, mode: int = 0o644) -> None:
    (project / "slurmtrain.yaml").write_text(f"registry: {value}\n")
    (project / "slurmtrain.yaml").chmod(mode)


def test_a_registry_can_be_on_a_server_in_a_schema_of_the_runs_root(project: Path) -> None:
    write_registry(project, "postgresql+psycopg://ann@db.site:5433/runs?sslmode=require")
    first, second = load(project), load(project, runs="elsewhere")
    assert str(first.registry) == "postgresql+psycopg://ann@db.site:5433/runs?sslmode=require"
    assert isinstance(first.registry, DatabaseUrl)
    assert isinstance(second.registry, DatabaseUrl)
    assert first.registry.root == project / "runs"
    assert first.registry.schema.startswith("slurmtrain_project_runs_")
    assert first.registry.schema != second.registry.schema


@pytest.mark.parametrize(
    "rest",
    ["db.site/runs", "/runs", "ann@/runs?host=/run/postgresql", "?service=runs", "a%40b@[::1]:5433/x?sslmode=require"],
)
def test_an_address_reaches_libpq_as_it_is(project: Path, rest: str) -> None:
    write_registry(project, f"postgresql+psycopg://{rest}")
    registry = load(project).registry
    assert isinstance(registry, DatabaseUrl)
    assert registry.text == f"postgresql://{rest}"
    assert str(registry) == f"postgresql+psycopg://{rest}"
    assert psycopg.conninfo.conninfo_to_dict(registry.text)


def test_the_schema_of_a_registry_can_be_named(project: Path) -> None:
    write_registry(project, "postgresql://ann@db.site/runs?options=-csearch_path%3Dvision")
    registry = load(project).registry
    assert isinstance(registry, DatabaseUrl)
    assert registry.schema == "vision"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("mysql://db/runs", "cannot be mysql://; expected a file, or a database such as"),
        ("postgresql://db:port/runs", "has a port that is not a number"),
        (
            "postgresql://ann:s3cret/x@db/runs",
            r"has an @ after the host: write /, \?, # and @ in a name or a password as",
        ),
        ("postgresql://ann:s3cret#x@db/runs", "has an @ after the host"),
        ("postgresql://ann:s3cret?x@db/runs", "has an @ after the host"),
        ("postgresql://ann:[s3cret@db/runs", "is not a URL"),
        ("postgresql://db/runs?options=-csearch_path%3D%22a;b%22", "has a search_path that is not one name"),
        ("postgresql://ann:s3cret@db/runs", r"has a password, which others could read here; keep it in ~/\.pgpass"),
        ("postgresql://db/runs?password=s3cret", "has a password, which others could read here"),
        ("postgresql://db/runs?sslpassword=s3cret", "has a password, which others could read here"),
    ],
)
def test_a_registry_that_cannot_be_used_is_a_mistake_which_shows_no_password(
    project: Path, value: str, message: str
) -> None:
    write_registry(project, value)
    with pytest.raises(SpecError, match=message) as caught:
        load(project)
    assert "slurmtrain.yaml:1" in str(caught.value)
    with pytest.raises(SpecError, match=f"SLURMTRAIN_REGISTRY.*{message}") as of_variable:
        load(project.parent, environ={"SLURMTRAIN_REGISTRY": value})
    assert "s3cret" not in str(caught.value) + str(of_variable.value)


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_tracking_uri_with_a_password_is_refused_with_what_to_write_instead(project: Path, mode: int) -> None:
    uri = "postgresql://ann:s3cret@db/mlflow"
    (project / "slurmtrain.yaml").write_text(f"mlflow_uri: {uri}\n")
    (project / "slurmtrain.yaml").chmod(mode)
    with pytest.raises(SpecError, match=r"mlflow_uri: credentials do not belong .*~/\.pgpass") as caught:
        load(project)
    with pytest.raises(SpecError, match=r"SLURMTRAIN_MLFLOW_URI.* credentials do not belong") as of_variable:
        load(project.parent, environ={"SLURMTRAIN_MLFLOW_URI": uri})
    assert "s3cret" not in str(caught.value) + str(of_variable.value)


def test_a_password_in_a_file_of_the_user_alone_is_used_and_never_shown(project: Path) -> None:
    write_registry(project, "postgresql://ann:s3cret@db/runs", mode=0o600)
    registry = load(project).registry
    assert isinstance(registry, DatabaseUrl)
    assert registry.password == "s3cret"
    assert str(registry) == "postgresql+psycopg://ann@db/runs"
    assert "s3cret" not in repr(load(project))


# --- who is told ------------------------------------------------------------------------------------------------------


def test_receivers_are_read_from_the_last_file_that_names_any(project: Path) -> None:
    user = user_file(project)
    user.write_text("notify: {mine: 'mailto:me@example.org'}\n")
    config = load(project)
    assert ({name: each.to for name, each in config.notify.items()}, config.notify_file) == (
        {"mine": "mailto:me@example.org"}, user,
    )  # fmt: skip
    path = project / "slurmtrain.yaml"
    path.write_text(
        "notify:\n  chat: {to: 'https://h/secret', states: [preempted], every: 3}\n  own: {command: tell}\n"
    )
    path.chmod(0o600)
    config = load(project)
    assert (list(config.notify), config.notify_file) == (["chat", "own"], path)
    assert (config.notify["chat"].states, config.notify["chat"].every) == (("preempted",), 3)
    assert read_receivers(path) == config.notify
    assert read_receivers(project / "missing.yaml") == {}
    assert "secret" not in repr(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{a: {states: [failed]}}", "set 'to', 'url_file' or 'command'"),
        ("{a: {to: 'https://h/secret', command: x}}", "'to' is set already"),
        ("{a: secret}", "expected https://"),
        ("{a: {command: x, states: [broken]}}", "expected one of started, failed, completed"),
        ("{'A b': {command: x}}", "expected a short name"),
        ("{a: 'https://h/secret'}", "make the file readable by you alone"),
    ],
)
def test_a_mistake_in_a_receiver_is_told_and_shows_no_url(project: Path, text: str, message: str) -> None:
    (project / "slurmtrain.yaml").write_text(f"notify: {text}\n")
    (project / "slurmtrain.yaml").chmod(0o644)
    with pytest.raises(SpecError) as error:
        load(project)
    assert message in str(error.value)
    assert "secret" not in str(error.value)
