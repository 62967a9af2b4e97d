"""What the documents say is so: generated pages, examples, links and versions."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import click
import pytest
import yaml

import slurmtrain
from slurmtrain.cli import cli
from slurmtrain.config import load_config
from slurmtrain.model.diagnosis.root_cause import scan_log
from slurmtrain.model.experiment.kinds import walk_keys
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.run.job_state import describe_reason
from slurmtrain.specfile import load_spec

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
REFERENCE = DOCS / "reference"
DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *DOCS.glob("**/*.md")])
_BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CLICK = version("click")
WITH_TESTED_CLICK = pytest.mark.skipif(
    f"\nclick=={_CLICK}\n" not in (REPOSITORY / "constraints.txt").read_text(),
    reason=f"the usage lines in docs/reference/cli.md are not those of click {_CLICK}",
)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def name_of(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def commands(group: click.Group, context: click.Context) -> Iterator[tuple[str, click.Command]]:
    """Every command below a group with its full name."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        inner = click.Context(command, parent=context, info_name=name)
        yield inner.command_path, command
        if isinstance(command, click.Group):
            yield from commands(command, inner)


EVERY_COMMAND = list(commands(cli, click.Context(cli, info_name="slurmtrain")))
YAML_BLOCKS = [
    pytest.param(text, id=f"{name_of(path)}-{number}")
    for path in DOCUMENTS
    for number, text in enumerate((t for language, t in _BLOCK.findall(path.read_text()) if language == "yaml"), 1)
]


def prose(path: Path) -> str:
    """A document without its code."""
    return re.sub(r"`[^`\n]+`", "", _BLOCK.sub("", path.read_text()))


def anchors(path: Path) -> set[str]:
    """The anchors that a page's headings get: lower case, punctuation gone, blanks to dashes."""
    headings = _HEADING.findall(_BLOCK.sub("", path.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def generate(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(place / "scripts" / "docs"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@WITH_TESTED_CLICK
def test_generated_pages_are_what_the_code_says_and_one_out_of_date_is_refused_with_a_diff_and_put_right(
    tmp_path: Path,
) -> None:
    shutil.copytree(REPOSITORY / "docs", tmp_path / "docs")
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPOSITORY / "scripts" / "docs", tmp_path / "scripts")
    (tmp_path / "slurmtrain").symlink_to(REPOSITORY / "slurmtrain")
    page = tmp_path / "docs" / "reference" / "spec.md"
    expected = page.read_text()
    page.write_text(expected.replace("`resources.nodes`", "`resources.gnomes`"))
    refused = generate(tmp_path, "--check")
    assert refused.returncode == 1
    assert re.findall(r"^--- (.*)$", refused.stdout, re.MULTILINE) == ["docs/reference/spec.md"]
    assert "-| `resources.gnomes`" in refused.stdout
    assert "+| `resources.nodes`" in refused.stdout
    assert generate(tmp_path).returncode == 0
    assert page.read_text() == expected


def test_every_key_of_a_spec_stands_in_its_reference() -> None:
    page = (REFERENCE / "spec.md").read_text()
    missing = [".".join(path) for path, _ in walk_keys(Spec) if f"| `{'.'.join(path)}` |" not in page]
    assert missing == []


def test_every_command_has_help_and_stands_in_the_reference() -> None:
    page = (REFERENCE / "cli.md").read_text()
    for name, command in EVERY_COMMAND:
        assert command.help, name
        assert command.short_help, name
        options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
        assert [f"{name} {option.name}" for option in options if not option.help] == []
        assert f"\n## {name}\n" in page


def test_the_help_of_every_command_ends_with_calls_of_it_that_can_be_typed() -> None:
    for name, command in EVERY_COMMAND:
        heading, *calls = (command.epilog or "").removeprefix("\b\n").splitlines()
        assert heading in ("Example:", "Examples:"), name
        assert calls, name
        for call in calls:
            assert call.startswith(f"  {name}")
            parse(cli, shlex.split(call)[1:])


def test_the_page_of_commands_leads_to_each_by_a_call_that_can_be_typed() -> None:
    rows = (REFERENCE / "cli.md").read_text().partition("\n## ")[0]
    calls = [shlex.split(call) for call in re.findall(r"`(slurmtrain [^`]+)`", rows) if "COMMAND" not in call]
    for call in calls:
        parse(cli, call[1:])
    assert set(cli.places) - {call[1] for call in calls} == set()


def parse(command: click.Command, words: list[str], parent: click.Context | None = None) -> None:
    """Parse a call, without its effect: click raises an error for what the command does not understand."""
    context = command.make_context(command.name, words, parent)
    rest = [*context._protected_args, *context.args]
    if isinstance(command, click.Group) and rest:
        _, inner, others = command.resolve_command(context, rest)
        assert inner is not None
        parse(inner, others, context)


@pytest.mark.parametrize("text", YAML_BLOCKS)
def test_every_yaml_example_is_a_valid_spec_or_configuration(text: str, tmp_path: Path) -> None:
    if "command" in yaml.safe_load(text):
        path = tmp_path / "example.yaml"
        path.write_text(text)
        assert load_spec(path, cwd=REPOSITORY, python=sys.executable).runs
    else:
        path = tmp_path / "slurmtrain.yaml"
        path.write_text(text)
        # It may have secrets.
        path.chmod(0o600)
        load_config(cwd=tmp_path, environ={"HOME": str(tmp_path)})


def test_documents_have_examples_of_specs() -> None:
    assert len([block for block in YAML_BLOCKS if "command:" in block.values[0]]) >= 5


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    broken = []
    for link in _LINK.findall(prose(path)):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_can_be_reached_from_the_list_of_pages() -> None:
    pages, readme = REPOSITORY / "docs" / "README.md", REPOSITORY / "README.md"
    reached = linked_from(pages) | {pages, readme}
    assert pages in linked_from(readme)
    assert {name_of(page) for page in DOCS.rglob("*.md") if page not in reached} == set()


def linked_from(page: Path) -> set[Path]:
    """The documents that this one links to."""
    return {(page.parent / link.partition("#")[0]).resolve() for link in _LINK.findall(prose(page))}


def symptoms(heading: str) -> list[str]:
    """What the rows below a heading of the page of symptoms quote in their first column."""
    section = (DOCS / "symptoms.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| ")]
    return [quoted for cell in cells for quoted in re.findall(r"`([^`]+)`", cell)]


def test_each_message_on_the_page_of_symptoms_is_one_of_ours() -> None:
    headings = re.findall(r"^## (.+)$", (DOCS / "symptoms.md").read_text(), re.MULTILINE)
    ours = [heading for heading in headings if heading not in (IN_LOGS, OF_SLURM)]
    quoted = [text for heading in ours for text in symptoms(heading) if " " in text]
    assert len(quoted) > 30
    texts = texts_in_source()
    assert [text for text in quoted if not is_in(text, texts)] == []


IN_LOGS, OF_SLURM = "Errors in a log", "Reasons of a pending job"


def test_each_error_and_reason_of_others_on_the_page_of_symptoms_is_known_to_the_doctor() -> None:
    quoted = [text.replace("...", "7") for text in symptoms(IN_LOGS)]
    assert len(quoted) > 15
    assert [text for text in quoted if not [*scan_log(text)]] == []
    reasons = symptoms(OF_SLURM)
    assert len(reasons) > 10
    assert [code for code in reasons if describe_reason(code, "1").startswith("Slurm says")] == []


def is_in(message: str, texts: list[str]) -> bool:
    """Whether a text of the source may be this message, in which ``...`` stands for values and what is left out."""
    parts = ".*".join(re.escape(part.strip()) for part in message.split("..."))
    return any(re.search(parts, text) for text in texts)


def texts_in_source() -> list[str]:
    """All texts of the package, with the values of f-strings as blanks."""
    texts = []
    for path in (REPOSITORY / "slurmtrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else " " for part in node.values))
    return texts


def test_the_newest_version_of_the_changelog_is_that_of_the_package() -> None:
    versions = re.findall(r"^## \[([^\]]+)\]", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == slurmtrain.__version__


def test_the_readme_begins_with_the_two_commands() -> None:
    first = _BLOCK.search((REPOSITORY / "README.md").read_text())
    assert first is not None
    assert [line.split()[0] for line in first[2].splitlines()] == ["scripts/quickstart", "scripts/test"]


def architecture(heading: str) -> str:
    """One section of ARCHITECTURE.md, up to the next heading of its level or of a higher one."""
    section = (REPOSITORY / "ARCHITECTURE.md").read_text().partition(f"\n{heading}\n")[2]
    return re.split(rf"^#{{1,{heading.index(' ')}}} ", section, maxsplit=1, flags=re.MULTILINE)[0]


def rows_of(section: str) -> list[tuple[str, str]]:
    """The rows of a section's table that begin with code."""
    return re.findall(r"^\| (`[^|]+) \| ([^|]+) \|$", section, re.MULTILINE)


def test_the_map_names_every_folder_of_the_package() -> None:
    rows = rows_of(architecture("## The map"))
    named = {word.rstrip("/") for row in rows for cell in row for word in re.findall(r"`([\w/]+)`", cell)}
    package = REPOSITORY / "slurmtrain"
    rooms = {
        str(path.parent.relative_to(package))
        for path in package.rglob("*.py")
        if not path.name.startswith("__") and path.parent != package
    }
    assert rooms - named == set()
    assert len(rows) <= 16


def test_each_walk_visits_at_most_ten_modules_each_once() -> None:
    walks = re.findall(r"^### .+$", architecture("## Three walks"), re.MULTILINE)
    assert len(walks) == 3
    for walk in walks:
        modules = [cell.strip("`") for cell, _ in rows_of(architecture(walk))]
        assert 5 <= len(modules) <= 10
        assert len(set(modules)) == len(modules)
        assert [name for name in modules if not (REPOSITORY / "slurmtrain" / f"{name}.py").is_file()] == []


def test_no_room_but_commands_and_verbs_holds_more_than_two_dozen_modules() -> None:
    rooms = Counter(path.parent for path in (REPOSITORY / "slurmtrain").rglob("*.py") if path.name != "__init__.py")
    exempt = {REPOSITORY / "slurmtrain" / name for name in ("cli", "ops")}
    assert {str(room): count for room, count in rooms.items() if count > 24 and room not in exempt} == {}


def promises(page: str, heading: str) -> list[tuple[str, list[str]]]:
    """The rows of the first table below a heading: each promise with the ids of its tests, which are the last cell."""
    section = (REPOSITORY / "docs" / page).read_text().partition(f"{heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").rpartition("|") for line in section.splitlines() if line.startswith("| ")]
    return [(promise.strip(), re.findall(r"`(tests/[^`]+)`", tests)) for promise, _, tests in rows[2:]]


def functions_of(file: str) -> set[str]:
    """The functions of a module of tests that pytest collects, by the names that pytest gives them."""
    path = REPOSITORY / file
    body = ast.parse(path.read_text()).body if path.is_file() else []
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in body if isinstance(node, functions) and node.name.startswith("test_")}


@pytest.mark.parametrize(
    ("page", "heading"), [("security.md", "\n## Promises"), ("reference/texts.md", "# Names and texts")]
)
def test_every_promise_names_tests_that_exist(page: str, heading: str) -> None:
    table = promises(page, heading)
    assert len(table) > 5
    assert [promise for promise, tests in table if not tests] == []
    named = [test.split("::") for _, tests in table for test in tests]
    assert ["::".join(parts) for parts in named if len(parts) != 2 or parts[1] not in functions_of(parts[0])] == []
