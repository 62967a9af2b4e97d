"""The Plan: one run, fully resolved, with a hash of its content."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slurmtrain.model.experiment.checkpoint import CONDITIONAL
from slurmtrain.model.experiment.code import CodeSnapshot, relative_to_root
from slurmtrain.model.experiment.kinds import (
    KeyPath,
    Section,
    plain_defaults,
    read_all,
    remembering,
    storable,
    texts_as_json,
)
from slurmtrain.model.experiment.launcher import (
    RANKS,
    add_options,
    choose_launcher,
    counts_of_command,
    describe_choice,
    split_command,
)
from slurmtrain.model.experiment.spec import Spec, write_spec
from slurmtrain.model.experiment.values import is_secret_variable

# The schema of plan.json. Readers refuse any other: a half-understood plan would train something else.
SCHEMA = 1
# Replaces a secret in files. When a plan is read back, a value that equals this text is not treated as a secret.
REDACTED = "<redacted>"
# Keys that are newer than the first plans: the hash leaves them out while they have their default, so that the same
# spec has the same hash in all versions.
LATER_KEYS: Sequence[KeyPath] = (
    ("requeue", "oom"), ("requeue", "keep_nodes"), ("resources", "accumulation"), ("code",), ("seed",),
    ("deterministic",), ("after",), ("start_from",), ("strategy",), ("resources", "grow"),
    ("resources", "mixed"), ("preflight", "hardware"), ("resources", "components"),
    ("resources", "gpu_type"), ("requeue", "lead"), ("resources", "bind"), ("log",),
    ("setup_node",), ("sidecars",), ("teardown",),
    ("completed_by",), ("idle_after",), ("measures",), ("profile",),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A spec with all defaults filled in, and the two paths that depend on the submitting machine.

    ``workdir`` and ``python`` are absolute paths; they are not part of the hashed content, so that the same spec has
    the same hash on any machine. ``template`` is the spec before interpolation, from which a later attempt with
    overrides is planned. ``code``: the snapshot that it runs, not hashed either; None if it runs what is in
    ``workdir``.
    """

    spec: Spec
    workdir: str
    python: str
    template: Mapping[str, Any]
    code: CodeSnapshot | None = None
    # Made once: a submission asks for both several times.
    _content: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _hash: str = field(default="", init=False, repr=False, compare=False)

    @property
    def content(self) -> Mapping[str, Any]:
        """The spec as plain data, which is not to be changed."""
        if not self._content:
            self._content.update(write_spec(self.spec))
        return self._content

    def working_directory(self, code: Path) -> Path:
        """Where the command runs in a run that has its own copy of its code, if any, in the directory ``code``."""
        if self.code is None:
            return Path(self.workdir)
        return self.code.tree(code) / (relative_to_root(self.workdir, self.code.root) or ".")

    def with_code(self, code: CodeSnapshot | None) -> Plan:
        """The plan with another snapshot, with which neither its content nor its hash changes.

        Args:
            code: The snapshot; None: it runs what is in ``workdir``.
        """
        return self._same_content(replace(self, code=code))

    def with_python(self, python: str) -> Plan:
        """The plan with another Python, with which neither its content nor its hash changes."""
        return self if python == self.python else self._same_content(replace(self, python=python))

    def for_node(self, node: int) -> Plan:
        """The plan as the agent of a ``node`` follows it, by its number from 0: ``resources`` are the node's."""
        resources = self.spec.resources.of_node(node)
        if resources is self.spec.resources:
            return self
        _ = self.hash  # noted before the values of the node take the place of the job's
        return self._same_content(replace(self, spec=replace(self.spec, resources=resources)))

    def asking(self, slurm: dict[str, Any]) -> Plan:
        """The plan with other options of sbatch, as it is asked of Slurm; neither its content nor its hash changes.

        Args:
            slurm: The section ``slurm``.
        """
        _ = self.hash  # noted before other values take the place of the spec's
        return self._same_content(replace(self, spec=replace(self.spec, slurm=slurm)))

    @property
    def components(self) -> list[Plan]:
        """The plan of each component of the job, as if it were a job of its own; without components, this plan."""
        specs = self.spec.components
        return [self] if specs == [self.spec] else [replace(self, spec=spec) for spec in specs]

    def _same_content(self, plan: Plan) -> Plan:
        # Plans are frozen, and these are caches that do not count in comparisons.
        object.__setattr__(plan, "_content", self._content)
        object.__setattr__(plan, "_hash", self._hash)
        return plan

    @property
    def words(self) -> list[str]:
        """The words of the command, with the options that its launcher needs, before placeholders are filled in."""
        command = self.spec.command
        if not self.spec.calls_launcher:
            return split_command(command)
        return add_options(command, on_own_gpus=self.spec.resources.single_node_with_gpus)

    def launcher_notes(self) -> list[str]:
        """Notes on what starts the ranks, for who submits this, as sentences without a full stop."""
        spec = self.spec
        chosen = not self.template.get("launcher")
        on_own_gpus = spec.resources.single_node_with_gpus
        counts = counts_of_command(spec.command, written_resources(self.template)) if spec.calls_launcher else {}
        return [
            *describe_choice(spec.command, spec.launcher or RANKS, chosen=chosen, on_own_gpus=on_own_gpus),
            *(f"'resources.{key}' is {value}, as {option} says" for key, (option, value) in counts.items()),
        ]

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical JSON of the content, in hex, without :data:`LATER_KEYS` that have their default."""
        if not self._hash:
            content = without_defaults(self.content, LATER_KEYS)
            # The same for the same content: sorted keys, no blanks, no NaN.
            text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
            object.__setattr__(self, "_hash", hashlib.sha256(text.encode()).hexdigest())
        return self._hash

    def to_json(self) -> dict[str, Any]:
        """The contents of ``plan.json``."""
        template = storable(self.template)
        # Parameters also refer to each other: what their template has is then no number.
        written = texts_as_json({**template, "params": self.spec.params})
        return {
            "schema": SCHEMA,
            "hash": self.hash,
            "workdir": self.workdir,
            "python": self.python,
            "spec": self.content,
            "template": template,
            # JSON keeps numbers, and not how they were written.
            **({"written": written} if written else {}),
            **({"code": self.code.to_dict()} if self.code is not None else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Read ``plan.json`` back. Raises ValueError if it is not a plan, or was made by a newer version."""
        if data.get("schema") != SCHEMA:
            raise ValueError(f"the plan has schema {data.get('schema')!r}, but this version reads {SCHEMA}")
        for name, kind in (("workdir", str), ("python", str), ("template", dict)):
            if not isinstance(data.get(name), kind):
                raise ValueError(f"its {name!r} is missing, or of the wrong type")
        spec, mistakes = read_all(Section(Spec), data["spec"])
        if mistakes:
            raise ValueError("; ".join(f"{'.'.join(at)}: {message}" for at, message in mistakes))
        code = CodeSnapshot.from_dict(data["code"]) if data.get("code") is not None else None
        texts = data.get("written", [])
        template = remembering(data["template"], texts)
        spec = replace(spec, params=remembering({"params": spec.params}, texts)["params"]) if texts else spec
        return cls(spec=spec, workdir=data["workdir"], python=data["python"], template=template, code=code)


def make_plan(
    spec: Spec, *, workdir: str, python: str, template: Mapping[str, Any], experiment: str | None = None
) -> tuple[Plan, dict[str, str]]:
    """Fill in what depends on other keys, and take the secrets out.

    Args:
        spec: As the user wrote it, interpolated.
        workdir: Where the command runs, absolute.
        python: What the word ``python`` in the command stands for, absolute.
        template: The spec before interpolation.
        experiment: The MLflow experiment of a spec that names none; None: the run's name.

    Returns:
        The plan, and the secret environment variables, which must reach the job without being written to any file.
    """
    secrets = {name: value for name, value in spec.env.items() if is_secret_variable(name, value) and value != REDACTED}
    # Both of these are in the hashed content, so a default that is written out does not change the hash.
    tracking = spec.tracking
    if tracking.mlflow.experiment is None:
        tracking = replace(tracking, mlflow=replace(tracking.mlflow, experiment=experiment or spec.name))
    resolved = replace(
        spec,
        launcher=spec.launcher or choose_launcher(spec.command),
        resources=spec.resources.resolved(),
        tracking=tracking,
        env={name: REDACTED if is_secret_variable(name, value) else value for name, value in spec.env.items()},
    )
    # An interpolation such as ${oc.env:TOKEN} is not a secret, and the next attempt needs it to find the value.
    env = {
        name: REDACTED if is_secret_variable(name, value) and "${" not in str(value) else value
        for name, value in (template.get("env") or {}).items()
    }
    template = {**template, "env": env} if env else dict(template)
    return Plan(spec=resolved, workdir=workdir, python=python, template=template), secrets


def written_resources(template: Mapping[str, Any]) -> Collection[str]:
    """The keys of ``resources`` that a spec has, before interpolation."""
    resources = template.get("resources")
    return [key for key, value in resources.items() if value is not None] if isinstance(resources, Mapping) else []


def without_defaults(content: Mapping[str, Any], keys: Sequence[KeyPath]) -> dict[str, Any]:
    """A plan's content, without the ``keys`` that have their default."""
    rest = dict(content)
    for *sections, key in keys:
        defaults, section = plain_defaults(Spec), rest
        for name in sections:
            section[name] = dict(section[name])
            defaults, section = defaults[name], section[name]
        if section.get(key) == defaults[key]:
            section.pop(key, None)
    return rest


_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def fill_command(plan: Plan, facts: Mapping[str, str | None]) -> list[str]:
    """The command as an argument vector, its placeholders filled in from ``facts``.

    If a fact is None, as ``resume_from`` is at a first start, the argument that holds it is left out together with the
    option before it: ``--resume {resume_from}`` and ``--resume={resume_from}`` both vanish. ``{resume_from?TEXT}`` is
    the text if the fact is known, else nothing; an argument that consists of it vanishes with it. Braces around
    anything that is not a fact stay. A launcher that is started once per node gets the options by which it
    finds the other nodes.
    """
    argv: list[str] = []
    for written in plan.words:
        word = CONDITIONAL.sub(lambda match: match[2] if facts.get(match[1]) is not None else "", written)
        if written and not word:
            continue
        names = [name for name in _PLACEHOLDER.findall(word) if name in facts]
        if any(facts[name] is None for name in names):
            # "--resume {resume_from}" are two words, and the option goes too; "--resume={resume_from}" is one.
            if word.startswith("{") and argv and argv[-1].startswith("-") and "=" not in argv[-1]:
                argv.pop()
            continue
        argv.append(_PLACEHOLDER.sub(lambda match: str(facts.get(match[1], match[0])), word))
    # "python" is not looked up on the node, where another one may come first on the PATH.
    if argv and argv[0] == "python":
        argv[0] = plan.python
    return argv
