"""What commands import: a command that lists runs must not cost what training costs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.fakeslurm import PARTITIONS, SlurmCommands
from helpers.rare import rare

from slurmtrain.model.run.events.base import encode

ROOT = Path(__file__).resolve().parents[2]
SPEC = ROOT / "experiments" / "digits" / "digits.yaml"
HEAVY = {"torch", "mlflow", "alembic", "numpy", "textual"}
# Runs a command as its console script does, and then, on standard error, names all that it has imported.
RUN_AND_TELL = """
import itertools, json, sys
from slurmtrain.cli import main
for is_separator, words in itertools.groupby(sys.argv[1:], "+".__eq__):
    if is_separator:
        continue
    try:
        main([*words])
    except SystemExit as ended:
        if ended.code:
            raise
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})), file=sys.stderr)
"""
IMPORT_AND_TELL = """
import json, sys
import slurmtrain
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""

# The same, and names what has been imported when the process that calls sbatch is started.
SUBMIT_AND_TELL = """
import json, sys
imported = []
def note(event, arguments):
    if event == "subprocess.Popen" and "slurmtrain.slurm.sbatch_process" in arguments[1]:
        imported.extend(sorted(sys.modules))
sys.addaudithook(note)
from slurmtrain.cli import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    if ended.code:
        raise
print(json.dumps(imported), file=sys.stderr)
"""


def modules_loaded_by(program: str, cwd: Path, *arguments: str) -> tuple[str, set[str]]:
    """What a program printed in a fresh process, and the names of modules that it wrote to stderr."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURMTRAIN_")}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    completed = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=cwd,
        env={**kept, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout, set(json.loads(completed.stderr.splitlines()[-1]))


@pytest.fixture
def one_run(tmp_path: Path) -> Path:
    """A directory with a run, as submit leaves it before it hands the job over, in its runs root."""
    from slurmtrain.model.run.events.command_events import RunCreated
    from slurmtrain.model.run.layout import RunsRoot, run_id
    from slurmtrain.system.journal import Journal

    run = RunsRoot(tmp_path / "runs").run(run_id(1_700_000_000_000, 7))
    run.journals.mkdir(parents=True)
    with Journal(run.journals / "created.jsonl") as journal:
        journal.write(RunCreated(name="heard-of", plan_hash="0" * 64, executor="local", by="me@here"))
    return tmp_path


def test_help_imports_none_of_the_heavy_libraries_and_no_database(tmp_path: Path) -> None:
    printed, imported = modules_loaded_by(RUN_AND_TELL, tmp_path, "--help")
    assert "Usage: slurmtrain" in printed
    assert not imported & (HEAVY | {"sqlalchemy", "omegaconf", "submitit", "rich", "jinja2", "psutil", "yaml"})


def test_only_a_page_on_a_terminal_imports_what_draws_it(tmp_path: Path) -> None:
    printed, imported = modules_loaded_by(RUN_AND_TELL, tmp_path, "top", "--help")
    assert "live page" in printed
    assert not imported & HEAVY


def test_render_imports_none_of_the_heavy_libraries_and_no_database(tmp_path: Path) -> None:
    call = ("render", str(SPEC))
    printed, imported = modules_loaded_by(RUN_AND_TELL, tmp_path, *call, "+", *call, "--json")
    assert printed.count("#SBATCH --job-name") == 2
    assert not imported & (HEAVY | {"sqlalchemy"})


def test_neither_the_first_status_of_a_run_nor_a_later_one_imports_any_of_the_heavy_libraries(one_run: Path) -> None:
    printed, imported = modules_loaded_by(RUN_AND_TELL, one_run, "status", "+", "status", "--json")
    assert printed.count("heard-of") >= 2
    assert "sqlalchemy" in imported, "the registry was not opened, so this test shows nothing"
    assert not imported & HEAVY


def test_a_page_is_written_without_the_heavy_libraries_and_show_imports_nothing_that_writes_it(one_run: Path) -> None:
    printed, imported = modules_loaded_by(RUN_AND_TELL, one_run, "report", "@last", "-o", "-")
    assert printed.startswith("<!doctype html>")
    assert not imported & HEAVY
    _, imported = modules_loaded_by(RUN_AND_TELL, one_run, "show", "@last", "+", "why", "@last")
    assert not imported & (HEAVY | {"jinja2", "markupsafe"})


def test_a_status_of_runs_that_have_ended_imports_nothing_that_reads_them(one_run: Path) -> None:
    [run] = (one_run / "runs").iterdir()
    process = {"host": socket.gethostname(), "boot": "before", "pid": 1, "start": 1}
    keys = {"submission": 1, "job_id": "j", "attempt": 1, "executor": "local", "host": process["host"]}
    lines = [("submitting", keys), ("submitted", {**keys, "process": process}), ("cancel", {})]
    text = b"".join(encode(2.0 + at, kind, record) for at, (kind, record) in enumerate(lines))
    (run / "journal" / "submit.jsonl").write_bytes(text)
    (run / "attempts").mkdir()
    for _ in range(2):
        # What was changed just now may change again unnoticed, so it counts as over only when that was long ago.
        for folder in ("journal", "attempts"):
            os.utime(run / folder, ns=(10**18, 10**18))
        modules_loaded_by(RUN_AND_TELL, one_run, "status")
    program = RUN_AND_TELL.replace('{name.partition(".")[0] for name in sys.modules}', "sys.modules")
    printed, imported = modules_loaded_by(program, one_run, "status")
    assert "cancelled" in printed
    assert "slurmtrain.registry.store" in imported
    readers = ("run.fold", "run.events.agent_events", "experiment.plan")
    assert not imported & {"slurmtrain.registry.ingest", "slurmtrain.system.journal"}
    assert not imported & {f"slurmtrain.model.{name}" for name in readers}
    assert {name for name in imported if name.startswith("sqlalchemy.dialects.postgresql")} == set()


def test_importing_slurmtrain_loads_neither_torch_nor_sqlalchemy(tmp_path: Path) -> None:
    _, imported = modules_loaded_by(IMPORT_AND_TELL, tmp_path)
    assert "slurmtrain" in imported
    assert not imported & {"torch", "sqlalchemy", "numpy", "click"}
    assert not [name for name in imported if name.startswith("slurmtrain.runtime")]


@pytest.mark.parametrize(
    ("name", "module"),
    [
        pytest.param("session", "session", marks=rare),
        ("progress", "loop"),
        pytest.param("leave", "loop", marks=rare),
    ],
)
def test_what_scripts_use_is_loaded_when_it_is_first_used(tmp_path: Path, name: str, module: str) -> None:
    used = f"import slurmtrain\nassert callable(slurmtrain.{name})\n"
    _, imported = modules_loaded_by(IMPORT_AND_TELL.replace("import slurmtrain\n", used), tmp_path)
    assert f"slurmtrain.runtime.training.{module}" in imported
    # A loop may be one of JAX, or of no library at all.
    assert ("torch" in imported) == (module == "session")


def test_the_agent_loads_neither_torch_nor_numpy_nor_what_only_few_agents_need(tmp_path: Path) -> None:
    rooms = ("agent.agent", "agent.rounds", "preflight.entry", "preflight.facts.measure", "agent.helpers")
    program = (
        "import sys\nfrom slurmtrain.runtime import task\nsys.argv = ['task', '--help']\n"
        # submitit is imported before its arguments are read.
        "try:\n    task.run_task()\nexcept SystemExit:\n    pass\nimport slurmtrain.slurm.requeue\n"
    )
    program += "".join(f"import slurmtrain.runtime.{room}\n" for room in rooms)
    # What the agent does without can be imported later, by a check of the site.
    later = "import sys\nbefore = sorted(sys.modules)\nimport numpy\nprint(json.dumps(before), file=sys.stderr)\n"
    beginning = IMPORT_AND_TELL.replace("import slurmtrain\n", program).partition("print(")[0]
    _, imported = modules_loaded_by(beginning + later, tmp_path)
    assert {"submitit.core.submission", "slurmtrain.runtime.agent.workers"} <= imported
    assert not imported & (HEAVY | {"psutil", "pydantic", "sqlalchemy", "xxhash", "yaml"})
    few = (
        "model.run.fold",
        "model.run.events.command",
        "runtime.checkpoint.checkpoint_formats",
        "runtime.agent.local_slots",
    )
    assert not [name for name in imported if name.startswith(tuple(f"slurmtrain.{each}" for each in few))]


def test_what_starts_a_local_job_imports_no_agent(tmp_path: Path) -> None:
    program = "import slurmtrain.local, slurmtrain.runtime.task, submitit\n"
    launcher = IMPORT_AND_TELL.replace("import slurmtrain\n", program)
    _, imported = modules_loaded_by(launcher, tmp_path)
    assert "slurmtrain.runtime.task" in imported
    assert not imported & (HEAVY | {"psutil", "pydantic", "sqlalchemy"})
    assert not [
        name for name in imported if name.startswith(("slurmtrain.runtime.agent", "slurmtrain.runtime.preflight"))
    ]


def test_what_sends_metrics_from_a_node_is_small(tmp_path: Path) -> None:
    sender = IMPORT_AND_TELL.replace("import slurmtrain\n", "import slurmtrain.tracking.to_mlflow.live_sender\n")
    _, imported = modules_loaded_by(sender, tmp_path)
    assert "slurmtrain.tracking.to_mlflow.rest_client" in imported
    assert not imported & (HEAVY | {"sqlalchemy", "requests", "numpy", "omegaconf", "yaml"})


def test_a_first_run_reaches_sbatch_without_what_only_later_ones_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = SlurmCommands(tmp_path / "bin")
    monkeypatch.setenv("PATH", slurm.on_path())
    slurm.replies("sbatch", "Submitted batch job 4711\n")
    slurm.replies("srun")
    slurm.replies("scontrol", PARTITIONS)
    spec = tmp_path / "spec.yaml"
    spec.write_text("name: x\ncommand: 'true'\ntracking: {mlflow: {enabled: false}}\n")
    _, imported = modules_loaded_by(SUBMIT_AND_TELL, tmp_path, "submit", str(spec), "--executor", "slurm")
    assert "slurmtrain.ops.shared.start" in imported
    # A spec that refers to nothing, and a runs root without a registry.
    assert not imported & (HEAVY | {"sqlalchemy", "omegaconf", "importlib.metadata", "psutil", "rich"})
    # What reads runs: their history, their ends, and what nodes said of them.
    readers = ("run.fold", "run.run", "run.events.agent_events", "interruption.policy", "interruption.exit_report")
    assert not imported & {f"slurmtrain.model.{name}" for name in readers}


def test_what_calls_sbatch_imports_neither_the_agent_nor_what_reads_specs(tmp_path: Path) -> None:
    launcher = IMPORT_AND_TELL.replace("import slurmtrain\n", "import slurmtrain.slurm.sbatch_process\n")
    _, imported = modules_loaded_by(launcher, tmp_path)
    own = {name for name in imported if name.startswith("slurmtrain.")}
    assert own <= {
        *("slurmtrain.version", "slurmtrain.slurm", "slurmtrain.slurm.sbatch_process", "slurmtrain.slurm.task"),
        *("slurmtrain.runtime", "slurmtrain.runtime.environment", "slurmtrain.runtime.environment.process_limits"),
    }
    assert "submitit" in imported
    assert not imported & (HEAVY | {"sqlalchemy", "yaml", "omegaconf", "jinja2", "psutil"})
