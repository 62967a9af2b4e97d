"""Steps and metrics from lines of which nobody has said how they look."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.metrics.guessed_lines import GuessReader
from slurmtrain.model.metrics.script_output import StepCounter

OUTPUTS = Path(__file__).parents[3] / "golden" / "script_output"
Placed = tuple[int | None, dict[str, float]]


def read(text: str) -> list[Placed]:
    """What lines say, each with its step; None if they are only counted. Carriage returns end lines too."""
    reader, counter, points = GuessReader(), StepCounter(), []
    for line in text.replace("\r", "\n").split("\n"):
        row = reader.read(line)
        if row is not None and (placed := counter.place(row)) is not None:
            points.append((None if row.counts else placed[0], dict(placed[1])))
    return points


@pytest.mark.parametrize("path", sorted(OUTPUTS.glob("*.log")), ids=lambda path: path.stem)
def test_what_libraries_and_examples_print_is_understood(path: Path) -> None:
    expected = [tuple(point) for point in json.loads(path.with_suffix(".json").read_text())]
    assert read(path.read_text(encoding="utf-8")) == expected


@pytest.mark.parametrize(
    ("text", "points"),
    [
        pytest.param("loss: 0.31", [(None, {"loss": 0.31})], id="a metric alone is counted"),
        pytest.param("step 12/100", [(12, {})], id="a step alone"),
        pytest.param("step 1/9\nloss: 0.3\nstep 2/9\nloss=0.2",
                     [(1, {}), (1, {"loss": 0.3}), (2, {}), (2, {"loss": 0.2})], id="the step is in a line before"),
        pytest.param("Epoch 3/10 loss=0.2", [(3, {"loss": 0.2})], id="epochs are steps where nothing else is"),
        pytest.param("Epoch 1/10\nTrain loss: 0.3\nVal loss: 0.2", [(1, {"Train_loss": 0.3}), (1, {"Val_loss": 0.2})],
                     id="an epoch in a line before"),
        pytest.param("epoch 2, step 30: loss 0.2", [(30, {"loss": 0.2})], id="a step is worth more than an epoch"),
        pytest.param("iter 30: loss 2.1, time 40ms", [(30, {"loss": 2.1})], id="times have units"),
        pytest.param("step 5 lr 1e-3", [(5, {"lr": 1e-3})], id="a learning rate beside a step"),
        pytest.param("lr 1e-3", [], id="a learning rate alone is a setting"),
        pytest.param("config: {'lr': 0.1, 'epochs': 10}", [], id="a number of epochs is a setting"),
        pytest.param("| epoch   1 |   200/ 2983 batches | lr 20.00 | ms/batch 12.34 | loss  7.62",
                     [(200, {"lr": 20.0, "loss": 7.62})], id="batches of an epoch, the word behind the number"),
        pytest.param('{"epoch": 1, "train_loss": "2.4", "note": "x"}', [(1, {"train_loss": 2.4})], id="JSON and texts"),
        pytest.param("2026-11-29 10:20:30,123 INFO t.py:12 - step 10 | val acc 91.2% | loss nan",
                     [(10, {"val_acc": 91.2, "loss": pytest.approx(float("nan"), nan_ok=True)})], id="a logger's line"),
        pytest.param("step=1 loss=tensor(0.5, device='cuda:0')", [(1, {"loss": 0.5})], id="a tensor"),
        pytest.param("Epoch [1/9], Step [10/10], Loss: 0.3\nEpoch [2/9], Step [5/10], Loss: 0.2",
                     [(10, {"Loss": 0.3}), (15, {"Loss": 0.2})], id="steps that begin again each epoch go on"),
        pytest.param("step 9/9 loss 0.3\nval step 1/3 val_loss 0.4\nval step 3/3 val_loss 0.5",
                     [(9, {"loss": 0.3}), (9, {"val_loss": 0.4}), (9, {"val_loss": 0.5})], id="a validation's steps"),
        pytest.param("t.py:3: UserWarning: x\n  loss = 1\n  9%|# | 9/99 [00:01<00:09, 9it/s, loss=2]\nTraceback (most "
                     'recent call last):\n  File "t.py"\nE: x\nstep 3: loss 1',
                     [(9, {"loss": 2.0}), (9, {"loss": 1.0})], id="warnings and tracebacks end"),
        pytest.param("Epoch 7: 45%|###  | 45/100 [00:10<00:12, 4.5it/s, loss=0.2]", [(None, {"loss": 0.2})],
                     id="a bar in a later epoch: how many steps came before is unknown"),
    ],
)  # fmt: skip
def test_a_line_says_where_training_is_in_many_ways(text: str, points: list[Placed]) -> None:
    assert read(text) == points


NO_NUMBERS = {
    "a version": "loss: 1.2.3",
    "an address": "loss: 10.0.0.1",
    "a time": "loss: 12:30",
    "a date": "loss: 2026-01-02",
    "a share of progress": "loss  45%|####   | 1/2 [00:00<00:00, 80it/s]",
    "a hash": "loss: 3e5f9ab loss=0x1f acc: 12345e7",
    "a shape": "loss: (3, 4) acc: [3, 4] score: 3x4 loss: torch.Size([3])",
    "a fraction": "Accuracy: 9823/10000",
    "a list, or a number with separators": "acc: 1,234 loss: 0.3,0.4",
    "a unit": "loss: 0.3s acc=12GB",
    "a path": "saved /runs/loss=0.3/ckpt_loss=0.31.pt and epoch=1-step=30-val_loss=4.66.ckpt",
    "a query": "https://host/?loss=3&acc=4",
    "code": "    loss = 0.5 * criterion(x)",
    "a comparison": "if loss == 3: stop",
    "a setting": "loss_weight: 0.5 label_smoothing=0.1 target_accuracy: 0.9 lr=0.1 max_steps: 100",
    "arguments": "Namespace(loss=0.3) CrossEntropyLoss(loss=0.3)",
    "a command": "python train.py --lr 0.1 --loss 3 acc=4",
    "a shell's echo": "+ train loss=3",
    "a count": "error: 3 files are missing",
    "a warning": "t.py:3: UserWarning: loss: 3\n  loss = 1",
    "a log of a warning": "WARNING loss: 3",
    "a traceback": 'Traceback (most recent call last):\n  File "t.py", line 3, in f\n    loss = 0.5\nE: loss: 0.5',
    "another rank's": "[rank3]: step 3 loss: 0.1",
    "a torchrun's": "[default1]:step 3 loss: 0.1",
    "a stage": "Step 1/4: preparing data",
    "prose": "the weight loss 3 of 4 patients",
    "a time for each step": "time per step: 3",
}  # fmt: skip


@pytest.mark.parametrize("text", NO_NUMBERS.values(), ids=NO_NUMBERS.keys())
def test_what_is_no_metric_is_read_as_none(text: str) -> None:
    assert read(text) == []


# What may stand in a line, and is no metric wherever it stands.
JUNK = st.one_of(
    st.from_regex(r"[0-9]{4}-[01][0-9]-[0-3][0-9]( [012][0-9]:[0-5][0-9]:[0-5][0-9](,[0-9]{3})?)?", fullmatch=True),
    st.from_regex(r"v?[0-9]{1,2}\.[0-9]{1,2}\.[0-9]{1,3}(\+cu[0-9]{3})?", fullmatch=True),
    st.from_regex(r"([0-9]{1,3}\.){3}[0-9]{1,3}(:[0-9]{2,5})?", fullmatch=True),
    st.from_regex(r"[0-9a-f]{7}[a-f][0-9a-f]{0,32}", fullmatch=True),
    st.from_regex(r"[(\[][0-9]{1,4}(, ?[0-9]{1,4}){1,3}[)\]]", fullmatch=True),
    st.from_regex(r"[0-9]{1,3}(\.[0-9])?(ms|s|GB|MiB|it/s|k|x[0-9])", fullmatch=True),
    st.from_regex(r"[0-9]{1,3}%\|", fullmatch=True),
    st.from_regex(r"[0-9]{1,5}/[0-9]{1,5}", fullmatch=True),
    st.from_regex(r"[a-z_]{1,12}(/[a-z0-9_.=]{1,8}){1,3}", fullmatch=True),
    st.sampled_from(["batch_size=32", "layers: 12", "seed 3", "dropout=0.1", "weight_decay: 0.01", "GPU 3", "took"]),
)  # fmt: skip
NAMES = st.sampled_from(["loss", "acc", "val_loss", "eval_accuracy", "f1", "train/loss", "lr"])


@given(st.lists(st.tuples(NAMES, st.sampled_from([": ", "=", " ", " = "]), JUNK), min_size=1, max_size=4))
def test_no_name_makes_a_number_of_what_is_none(parts: list[tuple[str, str, str]]) -> None:
    line = ", ".join("".join(part) for part in parts)
    assert [metrics for _, metrics in read(f"step 3: {line}") if metrics] == []


@given(
    st.lists(JUNK, max_size=4), st.lists(JUNK, max_size=4),
    st.integers(0, 10**6), st.floats(allow_nan=False, allow_infinity=False, width=32),
)  # fmt: skip
def test_junk_around_a_metric_makes_no_other_number_of_it(
    before: list[str], after: list[str], step: int, value: float
) -> None:
    line = " | ".join([*before, f"step {step}: loss={value!r}", *after])
    # A path may contain a word that makes the line one of code.
    assert read(line) in ([(step, {"loss": value})], [])


@given(st.text(alphabet="los acestp:=/|[]%.0123456789-\t\x1b\r", max_size=200))
def test_any_text_is_read_without_an_error_and_says_only_numbers_in_it(text: str) -> None:
    for _, metrics in read(text):
        assert all(any(f"{digit}" in text for digit in repr(value) if digit.isdigit()) for value in metrics.values())


def test_a_script_that_invents_names_has_only_so_many_metrics() -> None:
    points = read("\n".join(f"loss_{number}x: 1.5" for number in range(200)))
    assert len({name for _, metrics in points for name in metrics}) == 64
