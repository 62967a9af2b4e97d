"""Steps and metrics in the log lines that people's scripts print already, without anybody having said how they look.

Only numbers that a line calls a result by its name (``loss: 0.31``, ``'eval_accuracy': 0.9``, ``val acc=91.2%``) are
metrics, and learning rates beside a step or a result. Everything that could be something else is none: dates, times,
versions, addresses, hashes, shapes, shares of progress, what is part of a traceback, a warning, code or a command.
Nobody has promised what these lines mean, so what is read here is shown and decides nothing. Pure.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from slurmtrain.model.metrics.script_output import CONTROLS, LONGEST_LINE, OutputRow, as_number, as_steps

# --- which names are metrics ------------------------------------------------------------------------------------------
# Parts of names that say what a number is: train/loss, eval_top5, d_loss.
_RESULTS = frozenset(
    {"loss", "losses", "acc", "accuracy", "ppl", "perplexity", "f1", "auc", "auroc", "auprc", "bleu", "rouge",
     "meteor", "mse", "mae", "rmse", "mape", "bpb", "bpc", "nll", "reward", "rewards", "return", "returns", "score",
     "precision", "prec", "recall", "iou", "miou", "psnr", "ssim", "fid", "wer", "cer", "elbo", "kl", "dice",
     "error", "err", "top1", "top5", "entropy", "likelihood", "fscore", "r2", "mrr", "ndcg"}
)  # fmt: skip
_RATES = frozenset({"lr", "learning", "grad", "gnorm"})
# With one of these in its name, a number says how training is set up, not how it goes.
_SETTINGS = frozenset(
    {"fn", "func", "function", "type", "name", "weight", "weights", "coef", "coeff", "coefficient", "alpha", "beta",
     "lambda", "threshold", "target", "margin", "smoothing", "scale", "scaler", "patience", "schedule", "scheduler",
     "warmup", "decay", "every", "interval", "freq", "frequency", "steps", "path", "file", "dir", "size", "id",
     "count", "num", "seed", "time", "sec", "secs", "seconds", "ms", "eta", "version", "port", "code", "clipping",
     "mode", "reduction", "factor", "delta", "limit", "tolerance", "tol", "init", "accum", "accumulation"}
)  # fmt: skip
# Words before a name that are part of it: "val loss 2.0".
_BEFORE = "train|training|val|valid|validation|test|testing|eval|evaluation|dev|avg|average|mean|running|total|best"
_NAME = r"[A-Za-z_][\w.@/-]*"
# A number that nothing follows which would make it something else: a unit, a time, a date, a version, a list, a sum.
_NUMBER = (
    r"[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|NaN|inf|Infinity|-inf)"
    r"(?:(?=%(?![|\w]))|(?![\w%:/@\u00d7]|[.,-]\w|\s*[*^]))"
)
_PAIR = re.compile(
    rf"(?<![\w.@/%$?&-])(?P<before>(?:(?:{_BEFORE})\s+)*)['\"]?(?P<name>{_NAME})['\"]?"
    rf"(?:(?P<sign>\s*[:=]\s*['\"]?)|\s+)(?:tensor\()?(?P<value>{_NUMBER})(?P<percent>%?)",
    re.IGNORECASE,
)
# "error: 3 files are missing": what is counted is no result.
_COUNTED = re.compile(r"\s+[A-Za-z]{2,}\b(?!\s*[:=]|\s+[-+.\d])")
# 4711e12: so no program prints a number.
_HASH = re.compile(r"\d{3,}[eE]")
_PARTS = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*")
_LONGEST_NAME = 60
# As many blanks as a script likes: expressions would look for beginnings at each of them.
_BLANKS = re.compile(r"\s{4,}")
_MOST_NAMES = 64

# --- which lines say nothing ------------------------------------------------------------------------------------------
# Searched for in each line of a log. Most lines have none of them.
_HINTS = tuple(sorted(_RESULTS | _RATES | {"step", "iter", "update", "epoch", "%|", "traceback", 'file "', "warn"}))
_TRACEBACK = re.compile(r"^\s*(?:\S+\s+)?Traceback \(most recent call last\)|^\s*File \".*\", line \d+")
_SAYS_NOTHING = re.compile(
    # Warnings and errors; the names of exceptions; a class with its arguments, as configurations are printed;
    r"\b[Ww]arn(?:ing)?\b|\bWARN(?:ING)?\b|\b(?:ERROR|FATAL|CRITICAL|DEBUG)\b|\b[A-Z]\w*(?:Warning|Error|Exception)\b"
    r"|\b[A-Z][a-z]\w+\(|"
    # a command with its options; code.
    r"(?:^|\s)--[A-Za-z]|^\s*(?:\+|\$|>>>|#)\s"
    r"|^\s*(?:def|return|import|from|for|if|assert|class|raise|with|while)\s+\w|\bself\.|\w\s*==|\blambda\b"
)
# The output of another rank, as launchers mark it.
_OTHER_RANK = re.compile(r"\brank[\s:=_]*[1-9]\d*\b|^\s*\[(?:default|rank)?[1-9]\d*\]:", re.IGNORECASE)

# --- which step it is -------------------------------------------------------------------------------------------------
_TOTAL = r"(?:\s*(?:/|of)\s*(?P<total>\d[\d,]*))?"
_STEP = re.compile(
    r"(?<![\w./-])(?:global[ _-]?)?(?P<word>step|iter|iteration|update)s?['\"]?\s*[:=#]?\s*[\[(]?\s*(?P<step>\d[\d,]*)"
    + _TOTAL
    + r"(?![\w%]|[.,-]\d|:\d)",
    re.IGNORECASE,
)
# What may stand beside a step in a line without metrics: "Step 1/4: preparing data" is about something else.
_BESIDE = re.compile(r"(?!(?:info|time|eta|elapsed|epoch|sec|left|remaining|it|ms)\b)[A-Za-z]{2,}", re.IGNORECASE)
# "max steps 100" is a setting, "seconds per step: 3" a time.
_NO_STEP_AFTER = re.compile(
    r"\b(?:per|each|every|max|min|total|num|warmup|save|log|eval|of|a|one)[\s_-]+$", re.IGNORECASE
)
# "epochs: 10" is a setting.
_EPOCH = re.compile(
    r"(?<![\w./-])epoch(?:s(?!['\"]?\s*[:=]))?['\"]?\s*[:=#]?\s*[\[(]?\s*(?P<step>\d[\d,]*)"
    + _TOTAL
    + r"(?![\w%]|[.,-]\d|:\d)",
    re.IGNORECASE,
)
_BATCH = re.compile(r"(?<![\w./-])batch\s*[:=#]?\s*[\[(]?\s*(?P<step>\d+)\s*(?:/|of)\s*(?P<total>\d+)(?![\w.%/])", re.I)
# tqdm, and Lightning's bars: 45%|####  | 45/100 [00:10<00:12, 4.50it/s, loss=0.2]
_TQDM = re.compile(r"^(?P<title>[^|]*?)\s*\d{1,3}%\|[^|]*\|\s*(?P<step>\d+)/(?P<total>\d+)\s*\[")
# Keras' bars, and those that rich draws: 45/100 ━━━━━━━━ 3s 20ms/step - loss: 2.1; the second without a bar.
_BAR = re.compile(
    r"(?:^|\s)(?P<step>\d+)/(?P<total>\d+)\s+(?:[━╸╺─=>.\[][━╸╺─=>. \]]{3,}|-\s+\d+m?s\b)|[━╸╺─]{3,}\s+(\d+)/(\d+)\s"
)
# [1/10][ 5/100], [0][ 5/100], [5/100]: the last one counts.
_BRACKETS = re.compile(r"(?<![\w.])(?:\[\s*\d+(?:/\d+)?\]\s*)?\[\s*(?P<step>\d+)\s*/\s*(?P<total>\d+)\](?![\w.])")
# | 200/ 2983 batches |, as in PyTorch's word language model
_BATCHES = re.compile(r"(?<![\w./])(?P<step>\d+)\s*/\s*(?P<total>\d+)\s+batches\b", re.IGNORECASE)
_OTHERS = (("bar", _BAR), ("batch", _BATCH), ("batch", _BATCHES), ("brackets", _BRACKETS))
_WITHIN_EPOCHS = ("bar", "batch", "brackets")
# Samples of an epoch, as in PyTorch's own examples: [640/60000 (1%)]
_SAMPLES = re.compile(r"\[\s*\d+/\d+\s*\(\s*[\d.]+%\s*\)\s*\]")
_VALIDATION = re.compile(r"\b(?:val|valid|validation|eval|evaluat\w*|test|dev)(?:\b|_)", re.IGNORECASE)
_TRAINING = re.compile(r"\btrain(?:ing)?(?:\b|_)", re.IGNORECASE)


class _Mark(NamedTuple):
    """What a line says about its place. ``kind``: which counter it is: others may count other things."""

    kind: tuple[str, int | None]
    step: int
    total: int | None
    is_titleless_bar: bool = False


class GuessReader:
    """Reads lines of a log. Steps, once a line has said one, never go back: counters may begin again each epoch."""

    def __init__(self) -> None:
        """Begin before the first line."""
        self.problem = ""
        self._names: set[str] = set()
        self._is_in_traceback = False
        # A warning's line of code is right behind it, and indented.
        self._is_behind_warning = False
        self._places = _Places()
        # Hugging Face's lines say no step. Its bar does, right behind them.
        self._waiting: dict[str, float] = {}

    def read(self, line: str) -> OutputRow | None:
        """What a ``line``, without its end, says; None: nothing."""
        is_special = self._is_in_traceback or self._is_behind_warning
        if not is_special and not any(map(line.lower().__contains__, _HINTS)):
            return None
        line = _BLANKS.sub("   ", CONTROLS.sub("", line[:LONGEST_LINE]).replace("\b", ""))
        if self._is_no_log(line):
            return None
        places, mark, epoch = self._places, _step_mark(line), _EPOCH.search(line)
        if epoch is not None:
            places.enter_epoch(as_steps(epoch["step"]), as_steps(epoch["total"] or ""))
        if mark is not None and mark.is_titleless_bar and places.note_bar(mark.kind) and self._waiting:
            metrics, self._waiting = self._waiting, {}
            return places.row(mark, metrics)
        metrics = self._metrics(line, is_placed=mark is not None or epoch is not None)
        if not metrics:
            # A line that says a step, how many there are, and nothing else.
            match = _STEP.search(line) if mark is not None and mark.total is not None else None
            is_alone = match is not None and not _BESIDE.search(line[: match.start()] + " " + line[match.end() :])
            return places.row_without_metrics(mark) if mark is not None and is_alone else None
        if mark is None and line.lstrip().startswith("{") and places.has_bar:
            self._waiting.update(metrics)
            return None
        is_validation = _VALIDATION.search(line) is not None and _TRAINING.search(line) is None
        return places.row(mark or places.epoch_as_mark(line), metrics, is_validation=is_validation)

    def _is_no_log(self, line: str) -> bool:
        """Whether a line is part of a traceback, a warning, code, a command, or of another rank."""
        if _TRACEBACK.search(line):
            self._is_in_traceback = True
            return True
        is_indented = not line.strip() or line[0] in " \t"
        if self._is_in_traceback:
            # The line that ends a traceback says what was raised.
            self._is_in_traceback = is_indented
            return True
        was_behind, self._is_behind_warning = self._is_behind_warning, False
        if (was_behind and is_indented) or _SAYS_NOTHING.search(line):
            self._is_behind_warning = not was_behind and "warn" in line.lower()
            return True
        return _OTHER_RANK.search(line) is not None

    def _metrics(self, line: str, *, is_placed: bool) -> dict[str, float]:
        """The metrics of a line. ``is_placed``: it says a step or an epoch, so that learning rates count too."""
        results: dict[str, float] = {}
        has_result, at = False, 0
        while (match := _PAIR.search(line, at)) is not None:
            at = match.end("value")
            name, is_result = _metric_name(match)
            # Two words beside each other are a metric only in a line that also says where training is.
            if not name or (match["sign"] is None and not is_placed):
                at = max(match.start() + 1, match.end("name") if not name else at)
                continue
            value = as_number(match["value"])
            if _HASH.match(match["value"]):
                continue
            is_counted = match["value"].isdecimal() and _COUNTED.match(line, at) is not None
            if value is None or is_counted or (match["percent"] and not is_result):
                continue
            has_result |= is_result
            results.setdefault(name, value)
        if not has_result and not (is_placed and results):
            return {}
        new = [name for name in results if name not in self._names][: _MOST_NAMES - len(self._names)]
        self._names.update(new)
        return {name: value for name, value in results.items() if name in self._names}


class _Places:
    """Where training is, by what lines have said."""

    def __init__(self) -> None:
        # The counter whose steps count, and whether lines with metrics have said so.
        self._main: tuple[str, int | None] | None = None
        self._is_certain = False
        self._last: dict[tuple[str, int | None], int] = {}
        self._base = 0
        self._step: int | None = None
        self._total: int | None = None
        self._epoch: int | None = None
        self._epochs: int | None = None
        self._epoch_of_step: int | None = None
        # The epoch of the first line is unknown, or samples are counted: so lines are.
        self._counts = False
        # The first bar without a title is a training's own: evaluations have bars too.
        self._bar: tuple[str, int | None] | None = None

    @property
    def has_bar(self) -> bool:
        """Whether a bar shows how far training is."""
        return self._bar is not None

    def note_bar(self, kind: tuple[str, int | None]) -> bool:
        """Note that there is a bar of this ``kind``. Returns whether it is the training's."""
        self._bar = self._bar or kind
        return self._bar == kind

    def enter_epoch(self, number: int | None, total: int | None) -> None:
        """Note the ``number`` of the epoch, and the ``total`` of epochs."""
        self._epoch, self._epochs = number, total

    def epoch_as_mark(self, line: str) -> _Mark | None:
        """The number of the epoch as the step of a ``line`` that says none; None if steps are something else."""
        # Samples are counted within an epoch: its number would put all of these lines at one step.
        self._counts |= _SAMPLES.search(line) is not None
        is_other = self._main is not None and self._main[0] != "epoch"
        return None if self._epoch is None or is_other else _Mark(("epoch", self._epochs), self._epoch, self._epochs)

    def row(self, mark: _Mark | None, metrics: dict[str, float], *, is_validation: bool = False) -> OutputRow:
        """A row with these ``metrics``, at the place of ``mark``, or of what came before."""
        if mark is not None and not self._is_certain:
            self._main, self._base, self._is_certain = mark.kind, 0, True
            # A bar within a later epoch: how many steps came before is unknown.
            self._counts |= mark.kind[0] in _WITHIN_EPOCHS and (self._epoch or 0) > 1
        if mark is not None and not self._counts:
            self._advance(mark, is_validation=is_validation)
        return OutputRow(self._step, metrics, self._total, counts=self._step is None)

    def row_without_metrics(self, mark: _Mark) -> OutputRow | None:
        """A row of a line that says nothing but its step; None if steps are something else."""
        if self._counts or self._main not in (None, mark.kind):
            return None
        self._main = mark.kind
        self._advance(mark, is_validation=False)
        return OutputRow(self._step, {}, self._total)

    def _advance(self, mark: _Mark, *, is_validation: bool) -> None:
        assert self._main is not None
        before = self._last.get(mark.kind)
        self._last[mark.kind] = mark.step
        if mark.kind != self._main:
            # Another counter: of a validation, which has its own, or of the same steps under another name.
            is_same = None in (mark.total, self._main[1]) or mark.total == self._main[1]
            if is_validation or not is_same or mark.kind[0] == "epoch" or self._base:
                return
            if self._main[0] == "epoch":
                self._main = mark.kind
            elif self._step is not None and mark.step < self._step:
                return
        elif before is not None and self._has_begun_again(before, mark.step):
            self._base += mark.total or before
        self._epoch_of_step = self._epoch
        self._step = self._base + mark.step
        # Within an epoch, a total is no total of the run.
        is_within = self._base or (self._epoch is not None and mark.kind[0] != "epoch")
        self._total = None if is_within else mark.total

    def _has_begun_again(self, before: int, step: int) -> bool:
        is_later = None not in (self._epoch, self._epoch_of_step) and self._epoch != self._epoch_of_step
        return step < before or (is_later and step == before and self._main is not None and self._main[0] != "epoch")


def _step_mark(line: str) -> _Mark | None:
    """The step that a line says in any of the ways that are known; None: it says none."""
    for match in _STEP.finditer(line):
        if _NO_STEP_AFTER.search(line, 0, match.start()) is None:
            # "iter" and "iteration" are the same counter, "step" may be another.
            return _as_mark(match["word"].lower()[:4], match)
    if (bar := _TQDM.match(line)) is not None:
        title = bar["title"].strip().rstrip(":")
        # A bar over epochs counts epochs.
        mark = _as_mark("epoch" if re.fullmatch(r"(?i)epochs?", title) else "bar", bar)
        return mark._replace(is_titleless_bar=not title) if mark is not None else None
    others = ((kind, pattern.search(line)) for kind, pattern in _OTHERS)
    return next((_as_mark(kind, results) for kind, results in others if results is not None), None)


def _as_mark(kind: str, match: re.Match[str]) -> _Mark | None:
    texts = match.groups() if match["step"] is None else (match["step"], match["total"])
    step, total = as_steps(texts[-2] or ""), as_steps(texts[-1] or "")
    if step is None or (total is not None and step > total):
        return None
    return _Mark((kind, total), step, total)


def _metric_name(match: re.Match[str]) -> tuple[str, bool]:
    """The name of a metric, and whether it is a result; empty if it is no metric."""
    written = match["name"]
    parts = {part.lower() for part in _PARTS.findall(written)} | {written.lower()}
    if len(written) > _LONGEST_NAME or parts & _SETTINGS:
        return "", False
    is_result = bool(parts & _RESULTS) or ("@" in written and "acc" in parts)
    if not is_result and not parts & _RATES:
        return "", False
    return "_".join([*match["before"].split(), written]), is_result
