"""Every message about a spec names something that is accepted, also for a script: each proposal is fed back."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.rare import THOROUGH
from helpers.specfiles import PYTHON, only_run

from slurmtrain.errors import Mistake, PathError, SpecError
from slurmtrain.model.experiment.kinds import OTHER_NAMES, Section
from slurmtrain.model.experiment.slurm_options import SLURM_OPTIONS
from slurmtrain.specfile import PlannedRun, load_spec
from slurmtrain.specfile.overrides import SCHEMA
from slurmtrain.system.yaml_file import parse_value, write_yaml

KeyPath = tuple[str, ...]
SCHEMA_NAMES = {path[0] for path in SCHEMA}
WRONG = [
    None, True, False, "", "abc", "a b", "Auto", "yes", "none", "1,2", "2-4", "4", "4 GB", "~/x", "A=1", "12 hours",
    1.5, 4.0, -1, 0, 7, 1e30, 10**20, ["a", 1], ["A=1", "B=2"], [1, {"b": 2}], [], {"a": 1}, {"min": 4, "max": 2}, {},
]  # fmt: skip


# What a right value may still lack in the rest of the spec, each with a proposal of its own.
DEPENDS = re.compile(
    r"has no effect|needs 'glob'|exclude each other|how much more the run may get|there are no GPUs|nodes cannot grow"
    r"|oom.at_most' raises|replicates the model|a run ends with all of them|cannot share|neither a metric"
    r"|divides layers|is less than|steps that are traced"
)


def mistakes_of(spec: dict[str, Any], tmp_path: Path) -> list[Mistake]:
    path = tmp_path / "exp.yaml"
    path.write_text(write_yaml(spec))
    try:
        load_spec(path, cwd=tmp_path, python=PYTHON)
    except SpecError as error:
        return [replace(mistake, where="") for mistake in error.mistakes]
    return []


def put(spec: dict[str, Any], at: KeyPath, value: object) -> dict[str, Any]:
    """The spec with a value at a key."""
    if not at:
        assert isinstance(value, dict)
        return value
    key, *below = at
    if isinstance(spec, list):
        return [*spec[: int(key)], put(spec[int(key)], tuple(below), value) if below else value, *spec[int(key) + 1 :]]
    inner = put(spec.get(key) or {}, tuple(below), value) if below else value
    return {**spec, key: inner}


def take(spec: Any, at: KeyPath) -> tuple[dict[str, Any], Any]:
    """The spec without a key, and the key's value; a list item is a key, too."""
    *parents, last = at
    section = spec
    for key in parents:
        section = section[int(key)] if isinstance(section, list) else section.get(key, {})
    if isinstance(section, list):
        value, rest = section[int(last)], [*section[: int(last)], *section[int(last) + 1 :]]
    else:
        value = section.get(last)
        rest = {key: each for key, each in section.items() if key != last}
    return (put(spec, tuple(parents), rest) if parents else rest), value


def _is_in(spec: Any, at: KeyPath) -> bool:
    """Whether there can be such a key: in sections, or nothing yet, and in lists that are long enough."""
    for key in at:
        if isinstance(spec, list):
            if not key.isdecimal() or int(key) >= len(spec):
                return False
            spec = spec[int(key)]
        elif isinstance(spec, dict):
            spec = spec.get(key, {})
        else:
            return False
    return True


def proposals(message: str, spec: dict[str, Any], at: KeyPath) -> Iterator[dict[str, Any]]:
    """The specs that a message proposes instead of one with a mistake at a key."""
    # A shorthand has no keys below it.
    while at and not _is_in(spec, at):
        at = at[:-1]
    yield from other_keys(message, spec, at)
    yield from other_values(message, spec, at)


def other_keys(message: str, spec: dict[str, Any], at: KeyPath) -> Iterator[dict[str, Any]]:
    """The specs in which the value, or a word, is at the key that a message names."""
    without, value = take(spec, at) if at else (spec, None)
    # "did you mean 'a.b'?", "it belongs under 'a'", "use 'a.b'": the value goes there, if it is one that can be there.
    for word in re.findall(r"did you mean '([^']+)'\?", message):
        if "found" in message:
            yield put(spec, at, word)
        else:
            key = tuple(word.split("."))
            yield put(without, key if len(key) > 1 or (key in SCHEMA and len(at) == 1) else (*at[:-1], *key), value)
    for word in re.findall(r"belongs under '([^']+)'", message):
        yield put(without, (*word.split("."), at[-1]), value)
    if "belongs at the top level" in message:
        yield put(without, at[-1:], value)
    for words in re.findall(r"expected one of ([^;]*?), found", message):
        yield from (put(spec, at, word) for word in words.split(", "))
    for words in re.findall(r"the keys here are (.*)", message):
        yield from (put(without, (*at[:-1], word), value) for word in words.split(", ")[:3])


def other_values(message: str, spec: dict[str, Any], at: KeyPath) -> Iterator[dict[str, Any]]:
    """The specs in which the key has the value that a message names, or is left out, or a key beside it is set."""
    without, value = take(spec, at) if at else (spec, None)
    for number in re.findall(r"of at least ([\d.]+\d|\d)|from (\d+) to \d+|above 0 and at most (\d+)", message):
        yield put(spec, at, parse_value("".join(number)))
    if "true or false, found" in message:
        yield put(spec, at, True)
    if "put it in quotes" in message:
        yield put(spec, at, str(value).lower())
    if "leave it out" in message:
        yield without
    # "write 'nodes: {min: 1, max: 2}'" and "set 'at_most', such as '64GB', or 'mem', such as 'x2'": keys beside it.
    beside = re.findall(r"write '(\w+): ([^']*)'", message)
    beside += re.findall(r"'([\w.]+)', such as '([^']*)'", message)
    for key, written in beside:
        with contextlib.suppress(ValueError):
            written = parse_value(written)
        section = at if at in SCHEMA and isinstance(SCHEMA[at], Section) else at[:-1]
        yield put(spec, tuple(key.split(".")) if "." in key else (*section, key), written)
    for typed in re.findall(r"into the list slurm.sbatch: '([^']*)'", message):
        yield put(without, ("slurm", "sbatch"), [typed])
    for written in (
        []
        if beside
        else re.findall(r"[;,:] write (?:it in quotes, )?(?:for example )?(.*?)(?: for one of them)?$", message)
    ):
        # Several examples are a list without brackets.
        several = [] if written[0] in "[{" else re.split(r", | or ", written.partition("; ")[0])
        yield from (put(spec, at, parse_value(each)) for each in several or [written])


@pytest.mark.parametrize(
    ("index", "path"), enumerate(SCHEMA), ids=lambda each: ".".join(each) if isinstance(each, tuple) else ""
)
def test_what_a_message_about_a_value_proposes_is_accepted(index: int, path: KeyPath, tmp_path: Path) -> None:
    dead_ends = []
    # Some for each key, and for others of its kind the next ones.
    for wrong in WRONG if THOROUGH else WRONG[index % 8 :: 8]:
        spec = put({"command": "python t.py"}, path, wrong)
        for mistake in mistakes_of(spec, tmp_path):
            at = tuple(mistake.key.split(".")) if mistake.key else ()
            proposed = list(proposals(mistake.message, spec, at))
            wrong_again = [
                (each, new)
                for each in proposed
                for new in mistakes_of(each, tmp_path)
                if new == mistake or (new.key == mistake.key and not DEPENDS.search(new.message))
            ]
            if not proposed or wrong_again:
                dead_ends.append(f"{wrong!r}: {mistake} -> {wrong_again or 'nothing'}")
    assert not dead_ends, "\n".join(dead_ends)


def test_the_key_that_an_unknown_one_may_be_is_known(tmp_path: Path) -> None:
    for name in {"nodse", "partition", "lr", "nodes", *OTHER_NAMES} - SCHEMA_NAMES:
        spec = {"command": "python t.py", name: 1}
        [mistake, *_] = [each for each in mistakes_of(spec, tmp_path) if each.key == name]
        proposed = list(proposals(mistake.message, spec, (name,)))
        assert proposed
        for each in proposed:
            assert not any("unknown key" in new.message for new in mistakes_of(each, tmp_path)), mistake


@pytest.mark.parametrize("program", ["sbatch", "srun"])
def test_the_keys_that_stand_for_an_option_of_slurm_are_known(program: str) -> None:
    keys = {".".join(path) for path in SCHEMA} | {"sweep", "parallel"}
    options = {option.replace("_", "-") for option in SLURM_OPTIONS}
    for name, option in SLURM_OPTIONS.items():
        for word in re.findall(r"'([^' ]+)(?:: [^']*)?'", option.advice(program) or ""):
            assert word in keys | options | {"slurm", "h100:4"}, (name, word)


SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=gpt
#SBATCH -N 2
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:h100:4
#SBATCH -c 8
#SBATCH --mem=64000
#SBATCH -t 12:00:00   # half a day
#SBATCH -p gpu -A 0123
#SBATCH -o logs/%x-%j.out
#SBATCH --mail-type=END,FAIL
#SBATCH --array=0-9

set -e
module load cuda
if [ -e venv ]; then
  source venv/bin/activate
fi
srun --cpu-bind=none -n 8 python train.py \\
   --out ${SCRATCH}/x --note "it's"
echo done
"""


def planned_from(script: str, tmp_path: Path, name: str = "old.sbatch") -> tuple[PlannedRun, str]:
    """The run of the spec that is proposed instead of a script, and its text."""
    (tmp_path / name).write_text(script)
    with pytest.raises(PathError) as raised:
        load_spec(tmp_path / name, cwd=tmp_path, python=PYTHON)
    message, _, text = str(raised.value).partition("\n\n")
    assert f"is a batch script for sbatch; a spec is a YAML file: write this into {tmp_path}/old.yaml" in message
    (tmp_path / "old.yaml").write_text(text)
    return only_run(load_spec(tmp_path / "old.yaml", cwd=tmp_path, python=PYTHON)), text


def test_a_batch_script_is_told_as_a_spec_that_is_accepted(tmp_path: Path) -> None:
    planned, text = planned_from(SCRIPT, tmp_path)
    spec = planned.plan.spec
    assert spec.name == "gpt"
    assert planned.plan.words == ["bash", "-c", 'python train.py --out ${SCRATCH}/x --note "it\'s"']
    assert spec.setup == ("module load cuda", "if [ -e venv ]; then", "source venv/bin/activate", "fi")
    resources = spec.resources
    assert (resources.nodes.max, resources.procs_per_node, resources.cpus_per_proc) == (2, 4, 8)
    assert (resources.gpus_per_node, resources.gpu_type, resources.mem, resources.time) == (4, "h100", 64000, 43200)
    assert spec.slurm == {"partition": "gpu", "account": "0123", "mail_type": "END,FAIL"}
    assert spec.log == "logs/%x-%j.out"
    assert "# not translated: --array=0-9: use 'sweep'" in text


@pytest.mark.parametrize(
    ("body", "words", "keys"),
    [
        ("srun python train.py --lr 1", ["python", "train.py", "--lr", "1"], {"launcher": "ranks"}),
        (
            "srun -n1 --label torchrun --nnodes $SLURM_NNODES t.py $SCRATCH/x",
            ["bash", "-c", "torchrun t.py $SCRATCH/x"],
            {"launcher": "node"},
        ),
        ("srun torchrun t.py", ["torchrun", "t.py"], {"launcher": "node"}),
        ("make\n./run.sh", ["bash", "{path}"], {"launcher": "ranks"}),
        ("", ["bash", "{path}"], {"launcher": "ranks"}),
        ('python t.py "unclosed', ["bash", "{path}"], {"launcher": "ranks"}),
    ],
)
def test_the_command_is_the_last_that_trains_without_srun(
    tmp_path: Path, body: str, words: list[str], keys: dict[str, Any]
) -> None:
    planned, _ = planned_from(f"#!/bin/bash -l\n#SBATCH -N 1\n{body}\n", tmp_path)
    assert planned.plan.words == [word.format(path=tmp_path / "old.sbatch") for word in words]
    assert {key: getattr(planned.plan.spec, key) for key in keys} == keys


PLACES = """\
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --requeue
module load cuda
nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )
head=$(srun -N1 -n1 -w "${nodes[0]}" hostname --ip-address)
echo "Node IP: $head"
MASTER_ADDR=$head
export MASTER_ADDR MASTER_PORT=29500
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
export NCCL_DEBUG=WARN
"""


@pytest.mark.parametrize(
    ("call", "command", "procs"),
    [
        (
            "torchrun --nnodes $SLURM_NNODES --nproc-per-node=4 --rdzv-backend c10d \\\n"
            '  --rdzv_endpoint "$head:29500" --rdzv-id $RANDOM train.py --lr 1',
            "torchrun train.py --lr 1",
            4,
        ),
        ("torchrun --nproc_per_node 8 -m pkg.train", "torchrun -m pkg.train", 8),
        (
            "python -m torch.distributed.run --nnodes $N --nproc_per_node gpu --node_rank $SLURM_NODEID t.py",
            "python -m torch.distributed.run t.py",
            4,
        ),
        (
            "accelerate launch --multi_gpu --num_processes $((4 * SLURM_NNODES)) --num_machines=$SLURM_NNODES "
            "--machine_rank $SLURM_NODEID --main_process_ip $head --main_process_port 29500 train.py",
            "accelerate launch --multi_gpu train.py",
            4,
        ),
    ],
)
def test_what_a_batch_script_says_about_the_places_of_ranks_is_left_out(
    tmp_path: Path, call: str, command: str, procs: int
) -> None:
    planned, text = planned_from(f"#!/bin/bash\n{PLACES}\nsrun {call}\n", tmp_path)
    spec = planned.plan.spec
    assert spec.command == command
    assert spec.setup == ("module load cuda", "export NCCL_DEBUG=WARN")
    resources = spec.resources
    assert (resources.nodes.max, resources.procs_per_node, resources.cpus_per_proc) == (2, procs, 32 // procs)
    assert "# not needed: MASTER_ADDR=$head\n" in text
    assert "# not translated" not in text


def test_a_variable_that_a_batch_script_still_reads_stays_in_setup(tmp_path: Path) -> None:
    body = "DATA=/scratch/$USER\nUNUSED=1\nmkdir -p $DATA\nexport RUN=$(date)\npython t.py\n"
    planned, text = planned_from(f"#!/bin/bash\n#SBATCH -N 1\n{body}", tmp_path)
    assert planned.plan.spec.setup == ("DATA=/scratch/$USER", "mkdir -p $DATA", "export RUN=$(date)")
    assert "# not needed: UNUSED=1\n" in text


@pytest.mark.parametrize(
    "directive",
    [
        "--mem=lots", "--nodes=2-4", "--nodes=x", "--time=UNLIMITED", "--gres=tmp:1", "--bogus", "-Z 1", "'",
        "--mem=0",
    ],
)  # fmt: skip
def test_a_directive_that_cannot_be_translated_leaves_a_spec_that_is_accepted(tmp_path: Path, directive: str) -> None:
    planned, _ = planned_from(f"#!/bin/sh\n#SBATCH {directive}\npython t.py\n", tmp_path)
    assert planned.plan.words == ["python", "t.py"]


@pytest.mark.parametrize(
    ("name", "text", "command"),
    [
        ("train.py", "import torch\n", "python"),
        ("my train.sh", "ls\n", "bash"),
        ("train", "#!/usr/bin/env python3\n", "python"),
        ("job.slurm", "#!/bin/bash\npython x.py\n", "bash"),
    ],
)
def test_a_script_is_told_from_a_spec(tmp_path: Path, name: str, text: str, command: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(
        PathError, match=rf"is a script; a spec is a YAML file with a line such as 'command: {command} "
    ):
        load_spec(path, cwd=tmp_path, python=PYTHON)
