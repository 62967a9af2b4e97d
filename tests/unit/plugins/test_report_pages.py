"""Pages: what is in the file, and that nothing in it can be anything but text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers.hostile_names import draw_names

from slurmtrain.plugins.report import pages

ASSETS = Path(pages.__file__).parent / "assets"
HOSTILE = [
    *draw_names(40),
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "<img src=x onerror=alert(1)>",
    "]]>",
    "&lt;&#60;",
    "{{ 7 * 7 }}{% raw %}",
    "a\u2028b\u2029c",
]


class Elements(HTMLParser):
    """The elements of a page: their tags and attributes, and the text within each script."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[int, str] = {}
        self._is_open = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._is_open = True

    def handle_endtag(self, tag: str) -> None:
        self._is_open = False

    def handle_data(self, data: str) -> None:
        if self._is_open:
            self.texts[len(self.tags) - 1] = self.texts.get(len(self.tags) - 1, "") + data

    def text(self, tag: str, **attributes: str) -> list[str]:
        return [
            self.texts.get(index, "")
            for index, (name, own) in enumerate(self.tags)
            if name == tag and attributes.items() <= own.items()
        ]

    @property
    def policy(self) -> str:
        return next(str(own["content"]) for _, own in self.tags if own.get("http-equiv") == "Content-Security-Policy")


def facts(**more: object) -> dict[str, object]:
    return {"kind": "run", "id": "6b2ctm5j6q", "title": "digits", "as_of": "2026-11-22T10:30:00Z", **more}


def test_the_libraries_are_the_ones_that_were_noted() -> None:
    notes = json.loads((ASSETS / "vendored.json").read_text())
    assert {path.name for path in ASSETS.iterdir() if path.name.endswith((".min.js", ".LICENSE"))} == set(notes)
    for name, note in notes.items():
        assert hashlib.sha256((ASSETS / name).read_bytes()).hexdigest() == note["sha256"], name


def test_a_page_permits_its_own_scripts_alone_and_no_network() -> None:
    elements = Elements(pages.build_page(facts()))
    policy = elements.policy
    permitted = set(re.findall(r"'sha256-([^']+)'", policy))
    scripts = [text for text in elements.text("script") if not text.startswith("{")]
    assert {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts} == permitted
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert "unsafe-eval" not in policy
    assert not [each for _, each in elements.tags if each.get("src") or str(each.get("href", "")).startswith("http")]
    assert "ISC" in pages.build_page(facts())


def test_the_facts_of_a_page_are_as_they_were_whatever_they_contain() -> None:
    content = facts(title=HOSTILE[0], names=HOSTILE, by_name={name: [1.5, None, True] for name in HOSTILE})
    page = pages.build_page(content)
    elements = Elements(page)
    [text] = elements.text("script", id="facts")
    assert json.loads(text) == content
    # As many scripts as without them, and no other element.
    assert [tag for tag, _ in elements.tags] == [tag for tag, _ in Elements(pages.build_page(facts())).tags]
    assert elements.text("title") == [HOSTILE[0]]


def test_numbers_that_json_has_not_are_unknown() -> None:
    text = pages.facts_text({"values": [float("nan"), float("inf"), 1.0]})
    assert json.loads(text) == {"values": [None, None, 1.0]}


@pytest.mark.parametrize("title", HOSTILE)
def test_a_title_is_text(title: str) -> None:
    elements = Elements(pages.build_page(facts(title=title)))
    assert len(elements.text("title")) == 1
    assert elements.text("title")[0].replace("\r\n", "\n") == title.replace("\r\n", "\n")


def test_a_page_with_a_source_may_ask_where_it_comes_from() -> None:
    page = pages.build_page(facts(), source="/facts?of=<a>", links="/runs/")
    elements = Elements(page)
    [element] = [each for tag, each in elements.tags if each.get("id") == "facts"]
    assert (element["data-source"], element["data-links"]) == ("/facts?of=<a>", "/runs/")
    assert "connect-src 'self'" in elements.policy
