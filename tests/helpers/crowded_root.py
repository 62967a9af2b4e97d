"""A runs root as a busy user's: a sweep of 200 runs beside 15 single ones, some deleted, some with long names."""

from __future__ import annotations

from helpers.queried_runs import write_run
from helpers.simulated_run import SimulatedRun
from slurmtrain.ops.shared.workspace import Workspace

SWEEP = "00000000sw"
SWEPT, SINGLE = 200, 15
# Of the sweep's runs: as many of each state.
FAILED, RUNNING, WAITING = 3, 12, 30
_LONG = "resnet50-imagenet-warmup-cosine-"
_NAMES = ("gpt-7b", f"{_LONG}lr0.1", f"{_LONG}lr0.3", "bert", f"{_LONG}lr0.1-ema", "mlp")


def crowd(workspace: Workspace, swept: int = SWEPT, params: int = 0) -> None:
    """Fill a runs root.

    Args:
        workspace: It.
        swept: How many runs the sweep has.
        params: How many further parameters with long names each run has.
    """
    for number in range(swept):
        state = "completed"
        if number < FAILED + RUNNING + WAITING:
            state = "failed" if number < FAILED else "running" if number < FAILED + RUNNING else "pending"
        settings = {
            "lr": round(0.01 * (1 + number % 30), 2),
            "bs": 32 << number % 2,
            "epochs": 10,
            **_long_params(params, 0),
        }
        run = write_run(
            workspace, 1000 + number, "cnn", params=settings, sweep=SWEEP, days_ago=1.01,
            state="running" if state == "failed" else state,
            metrics={} if state == "pending" else {"loss": 1.0 - number / 1000, "val_acc": number / 1000},
            spec={"requeue": {"enabled": False}},
        )  # fmt: skip
        if state == "failed":
            fail(run, f"ValueError: the loss went up at step {number}")
    for number in range(SINGLE):
        state = ("completed", "running", "failed")[number % 3]
        run = write_run(
            workspace, 50_000 + number, _NAMES[number % len(_NAMES)], state="running" if state == "failed" else state,
            params={"lr": 0.1, "epochs": 10 + number, "layers": number, **_long_params(params, number)},
            metrics={"loss": 0.5}, days_ago=0.1003, spec={"requeue": {"enabled": False}},
        )  # fmt: skip
        if state == "failed":
            fail(run, "FileNotFoundError: [Errno 2] No such file or directory: '/data/imagenet/train'")
    for number in range(2):
        delete(write_run(workspace, 60_000 + number, "gone", params={"lr": 0.1}, metrics={"loss": 0.5}))
    for number in range(8):
        write_run(workspace, 100 + number, f"old-{number}", params={"lr": 0.5}, days_ago=40.01)


def _long_params(count: int, value: int) -> dict[str, object]:
    long = {f"probability_of_dropout_in_block_{number}": value / 100 for number in range(count)}
    return {"model": {"encoder": long}} if long else {}


def fail(run: SimulatedRun, error: str) -> None:
    """Rank 0 has raised an exception, as an earlier version put it."""
    run.ended("crash", reason=f"rank 0 exited with code 1: {error}")


def delete(run: SimulatedRun) -> None:
    """Its files are deleted."""
    run.command("delete", by="me").command("deleted", bytes=5)
