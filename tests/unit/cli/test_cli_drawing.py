"""How text is shortened: what differs stays visible, and an ellipsis says that something is missing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from slurmtrain.cli.drawing import Column, cell_len, draw, flow, shorten_names, whole_ones, wrap
from slurmtrain.model.query.folding import short_keys

LONG = "resnet50-imagenet-warmup-cosine-"


def test_names_that_begin_alike_lose_what_they_share() -> None:
    names = ["cnn", f"{LONG}lr0.1", f"{LONG}lr0.3", f"{LONG}lr0.1-ema", "a-name-of-its-own-that-is-long"]
    assert shorten_names(names, 16) == [
        "cnn", "resnet50-i…lr0.1", "resnet50-i…lr0.3", "resnet…lr0.1-ema", "a-name-of-its-o…"
    ]  # fmt: skip
    assert shorten_names(names, 100) == names
    # What all of them end with is shared as well, if that has to be left out.
    assert shorten_names([f"{LONG}a{'-and-so-on' * 5}", f"{LONG}b{'-and-so-on' * 5}"], 16) == [
        "resnet50-imag…a…", "resnet50-imag…b…"
    ]  # fmt: skip


@given(st.lists(st.text("ab-0", min_size=1, max_size=40), min_size=1, max_size=8), st.integers(4, 30))
def test_a_shortened_name_fits_and_says_that_it_is_shortened(names: list[str], width: int) -> None:
    shown = shorten_names(names, width)
    assert all(cell_len(text) <= width for text in shown)
    assert all(text == name or "…" in text for name, text in zip(names, shown, strict=True))


def test_keys_are_as_short_as_they_can_be_told_apart() -> None:
    assert short_keys(["model.encoder.layers", "optimizer.lr", "schedule.lr", "seed"]) == {
        "model.encoder.layers": "layers", "optimizer.lr": "optimizer.lr", "schedule.lr": "schedule.lr", "seed": "seed"
    }  # fmt: skip
    assert list(short_keys(["p.dropout_in_block_1", "p.dropout_in_block_2"]).values()) == ["…1", "…2"]
    assert short_keys([]) == {}


@pytest.mark.parametrize(
    ("width", "shown"),
    [(40, "lr=0.1 bs=64 opt=adam"), (20, "lr=0.1 bs=64 …+1"), (16, "lr=0.1 bs=64 …+1"), (12, "lr=0.1 …+2"),
     (7, "lr=0.1…"), (5, "lr=0…")],
)  # fmt: skip
def test_settings_are_whole_as_far_as_they_fit_and_the_others_are_counted(width: int, shown: str) -> None:
    assert whole_ones(["lr=0.1", "bs=64", "opt=adam"], width) == shown


def test_text_is_wrapped_between_words_where_that_is_possible() -> None:
    assert wrap("one two three", 8) == ["one two", "three"]
    assert wrap("a-very-long-word b", 8) == ["a-very-l", "ong-word", "b"]
    assert wrap("学習率が高い", 5) == ["学習", "率が", "高い"]
    assert wrap("", 5) == [""]
    # A terminal that does not know its size.
    assert wrap("one", 0) == ["o", "n", "e"]


def test_parts_stay_whole_and_continue_below_the_beginning() -> None:
    parts = ["3 failed,", "12 running,", "155 completed;", "lr 0.01..0.3"]
    shown = flow(Text("0000000001  cnn  "), parts, 50)
    assert [line.plain for line in shown] == [
        "0000000001  cnn  3 failed, 12 running,", " " * 17 + "155 completed; lr 0.01..0.3"
    ]  # fmt: skip
    # On a narrow terminal, at the left.
    shown = flow(Text("0000000001  cnn  "), parts, 40)
    assert [line.plain for line in shown] == ["0000000001  cnn  3 failed, 12 running,", "  155 completed; lr 0.01..0.3"]


def test_columns_without_room_are_named() -> None:
    columns = [Column("ID"), Column("NAME", lambda _: "x" * 9, 8), Column("EMPTY", lambda _: "-", rank=1),
               Column("STEP", lambda _: "7", rank=2)]  # fmt: skip
    assert draw(columns, ["0000000001"], 20).left_out == ["STEP"]
    assert draw(columns, ["0000000001"], 40).left_out == []
    assert draw(columns, ["0000000001"], 12).left_out == ["NAME", "STEP"]
