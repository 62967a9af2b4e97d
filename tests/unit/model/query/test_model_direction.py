"""Whether larger or smaller values of a metric are better."""

from __future__ import annotations

import pytest

from slurmtrain.model.query.direction import is_larger_better


@pytest.mark.parametrize(
    "name", ["loss", "val_loss", "valLoss", "eval/loss", "perplexity", "test.rmse", "step_time", "loss2", "WER"]
)
def test_smaller_values_of_losses_errors_and_times_are_better(name: str) -> None:
    assert is_larger_better(name) is False


@pytest.mark.parametrize(
    "name", ["acc", "val_accuracy", "acc@5", "acc1", "valAcc", "macro-F1", "f1", "auc", "BLEU", "reward", "r2"]
)
def test_larger_values_of_accuracies_and_scores_are_better(name: str) -> None:
    assert is_larger_better(name) is True


@pytest.mark.parametrize(
    "name", ["lr", "grad_norm", "epoch", "time_to_accuracy", "negative_log_likelihood", "", "損失"]
)
def test_other_names_do_not_show_it(name: str) -> None:
    assert is_larger_better(name) is None
