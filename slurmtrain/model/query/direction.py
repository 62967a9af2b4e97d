"""Whether larger or smaller values of a metric are better, by its name."""

from __future__ import annotations

import re

_WORDS = re.compile(r"[a-z]+[0-9]*")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# Words in the names of metrics; "negative" turns a likelihood around, so that it shows nothing.
_OF_SMALLER = """
loss losses error errors err perplexity ppl time latency seconds duration mse rmse mae mape msle nll nelbo wer cer ter
fid kid lpips brier ece eer kl divergence distance cost regret bpb bpc bpd penalty energy residual negative neg
"""
_OF_LARGER = """
acc accuracy f1 fscore auc auroc auprc roc precision recall ap map mrr ndcg bleu rouge meteor chrf cider iou miou dice
psnr ssim reward return returns score winrate r2 correlation pearson spearman mcc kappa throughput goodput speedup mfu
likelihood elbo em hits success
"""
_SMALLER, _LARGER = frozenset(_OF_SMALLER.split()), frozenset(_OF_LARGER.split())


def is_larger_better(name: str) -> bool | None:
    """Whether larger values of the metric ``name`` are better; None if its name does not show it."""
    words = _WORDS.findall(_CAMEL.sub("_", name).lower())
    stems = {*words, *(word.rstrip("0123456789") for word in words)}
    smaller, larger = bool(stems & _SMALLER), bool(stems & _LARGER)
    return None if smaller == larger else larger
