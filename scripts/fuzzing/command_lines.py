"""Command lines for every command that click knows: a new command is tried without being added anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import click
from helpers.sample_home import SAVED, STATES, SampleHome, id_of

from fuzzing.contents import ESCAPES, PATHS
from slurmtrain.cli import cli

# Commands that wait for something, and options that make others wait: they get a Ctrl-C. They are rarer, since a case
# of theirs takes seconds.
_WAITING = frozenset({"wait", "watch", "drill", "preflight", "checkpoint", "cancel", "ui"})
_WAITING_OPTIONS = frozenset({"--wait", "--watch", "--follow", "-f"})
_RARER = 0.1
_OVERRIDES = ("requeue.oom={mem: x2, at_most: 4GB}", "requeue.oom.mem=x0",
              "requeue.keep_nodes=10m", "requeue.keep_nodes=-1",
              "requeue.oom={accumulation: x2}", "requeue.oom.accumulation=x1.5", "resources.accumulation=0",
              "params.lr=0.5", "resources.nodes=1", "name=x", "checkpoint.every.steps=5", "slurm.hold=true", "a.b=c",
              "resources.nodes=1e9", "x", "requeue.enabled=false", "command=true", "env.A=\x1b[31m", "params=[1", "=",
              "resources.nodes=0", "params.x=${params.x}", "checkpoint.keep=null", "workdir=/nowhere", "sweep={}",
              "tracking.mlflow.enabled=true", "tracking.csv.enabled=true", "tracking.csv.dir=/nowhere",
              "tracking.live=x", "setup=[a]", "launcher=node", "resources.time=9999999999999",
              "tracking.tensorboard={enabled: true, dir: ../elsewhere}", "tracking.wandb.mode=online", "tracking.csv=5",
              "tracking.plugins={csv: {}}", "tracking.plugins.nope={a: 1}",
              "tracking.mlflow.experiment=\x1b[31m", "after=[x]", "after=afterany:", "after=[1]", "spec.yaml",
              "after=@last", "start_from=@last:best", "start_from={step: 1}", "start_from.load=x", "start_from=x:0",
              "strategy=fsdp", "strategy=zero3", "strategy={name: hsdp, offload: true}", "strategy.wrap=[\x1b[31m]",
              "params.x=${run.x.checkpoint}", "params.x=${run.x.}", "name=${run.x.id}")  # fmt: skip
_NODES = ("n0", "n1", "n[0-3]", "n[3-1]", "n[0-99999999999]", "", "[[", "\x1b[31m", "n[0-9]" * 9)


def every_command() -> dict[tuple[str, ...], click.Command]:
    """The commands by name, groups that do something by themselves included."""
    return dict(_below((), cli))


def _below(name: tuple[str, ...], command: click.Command) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for each in command.list_commands(context):
            inner = command.get_command(context, each)
            assert inner is not None
            yield from _below((*name, each), inner)
    if name:
        yield name, command


def waits(arguments: Sequence[str]) -> bool:
    """Whether a command may rightly take longer than a moment."""
    return bool(_WAITING.intersection(arguments) or _WAITING_OPTIONS.intersection(arguments))


def random_command(home: SampleHome, random: Random) -> tuple[str, list[str]]:
    """A command's name, and its command line; most arguments make sense."""
    commands = every_command()
    names = list(commands)
    weights = [_RARER if _WAITING.intersection(name) else 1.0 for name in names]
    name = random.choices(names, weights=weights)[0]
    arguments = [text for parameter in commands[name].params for text in _texts(parameter, home, random)]
    outer = ["--runs", _root(home, random)] if random.random() < 0.03 else []
    return " ".join(name), [*outer, *name, *arguments]


def _texts(parameter: click.Parameter, home: SampleHome, random: Random) -> list[str]:
    if isinstance(parameter, click.Argument):
        return _argument(parameter, home, random)
    assert isinstance(parameter, click.Option)
    option = random.choice(parameter.opts)
    # Tracebacks on request are none of ours, and help is no case.
    if option in ("--debug", "--help", "-h"):
        return []
    is_waiting = bool(_WAITING_OPTIONS.intersection(parameter.opts))
    if random.random() > (0.9 if parameter.required else 0.03 if is_waiting else 0.15 if option != "--json" else 0.4):
        return []
    if parameter.is_flag:
        return [option]
    return [option, _value(parameter, option, home, random)]


def _argument(parameter: click.Argument, home: SampleHome, random: Random) -> list[str]:
    label = (parameter.metavar or parameter.name or "").upper()
    if "KEY=VALUE" in label:
        return random.choices(_OVERRIDES, k=random.choice([0, 0, 0, 1, 2]))
    count = 1 if parameter.nargs == 1 else random.choice([0, 1, 1, 2, 3])
    if not parameter.required and random.random() < 0.4:
        return []
    return [_named(label, parameter, home, random) for _ in range(count)]


def _named(label: str, parameter: click.Parameter, home: SampleHome, random: Random) -> str:
    if "SPEC" in label and ("RUN" not in label or random.random() < 0.4):
        return random.choice(
            ["spec.yaml"] * 12 + ["train.py", "nowhere.yaml", ".", "", str(home.project / "spec.yaml")]
        )
    if "RUN" in label:
        return _run(random)
    if "NODE" in label:
        return random.choice(_NODES)
    return _value(parameter, "", home, random)


def _run(random: Random) -> str:
    state = random.choice(STATES)
    usual = [id_of(state)] * 12 + [state, state, id_of(state)[:9], "@last", "@last"]
    odd = [
        "",
        "nope",
        "@",
        "0",
        "x" * 5000,
        "..",
        "../runs",
        *ESCAPES[:4],
        "\udcff",
        "a\nb",
        id_of(state).upper(),
        "--",
        "*",
    ]
    return random.choice(usual if random.random() < 0.85 else odd)


def _root(home: SampleHome, random: Random) -> str:
    return random.choice(["runs", str(home.runs), str(home.path / "nowhere"), "spec.yaml", *PATHS])


def _value(parameter: click.Parameter, option: str, home: SampleHome, random: Random) -> str:
    if random.random() < 0.1:
        return random.choice(["", "-1", "x", "0", "1e400", "nan", "\x1b[31m", "9" * 30])
    kind: Any = parameter.type
    if isinstance(kind, click.Choice):
        return str(random.choice(list(kind.choices)))
    if isinstance(kind, click.types.IntParamType):
        return str(random.choice([1, 1, 2, 0, *SAVED, 10**12]))
    if isinstance(kind, click.types.FloatParamType):
        return str(random.choice([1, 10, 30.5, 0.5]))
    if option == "--runs":
        return _root(home, random)
    if option == "--spec":
        return "spec.yaml"
    if option == "--older-than":
        return random.choice(["0", "0", "1m", "30d", "1000000000000w"])
    if option == "--to":
        return random.choice(
            ["model.pt", "model.safetensors", "notes.txt", "nowhere/x.pt", ".", "runs/x.pt", "x.\x1b[1m.pt"]
        )
    if option == "--after":
        return random.choice(["afterany:@last", "afterok:x", "afterwards:x", "\x1b[31m", id_of(random.choice(STATES))])
    if option == "--from":
        run_id = id_of(random.choice(STATES))
        return random.choice([f"{run_id}:{SAVED[0]}", f"{run_id}:best", "@last", "6:20", "x:1:2", ":1", "\x1b[31m"])
    if option == "--sweep":
        return random.choice(
            [
                *("params.lr=1,2", "params.lr=", "x", "a.b=1", "params.steps=1,1", f"params.lr={'1,' * 3000}1"),
                *("params.lr=range(3)", "params.lr=uniform(0,1)", "samples=2", "seed=-1", "params.lr=range(9e9)"),
                *(
                    "parallel=2",
                    "pack=2",
                    "pack={runs: 2, share_gpu: 1}",
                    "pack={runs: 1, share_gpu: x}",
                    "zip={params.lr: [1, 2], params.steps: [1]}",
                    "include=[{}]",
                    "exclude=[{params.lr: 1}]",
                    "points=x",
                ),
                *("search={metric: loss, mode: min, trials: 3}", "search={trials: 0, pruner: x}", "search=median"),
                *("params.lr=linspace(0,1,99999999)", "params.lr=range(0,5,0)", "params.lr=choice(\x1b[31m)"),
            ]
        )
    return random.choice(["model", "optimizer", "x", "", "\x1b[31m", *PATHS])
