"""Reading a playbook: every mistake at once, each with file:line and the nearest valid name; and its JSON Schema."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from phases.playbook.known import check_architectures
from phases.playbook.located import Mistakes, Node, load_text, nearest, read_text
from phases.playbook.located import load as load_file
from phases.playbook.phase_kinds import PHASES, RULE_READER, RULE_SCHEMA, SHARED_SECTIONS, PhaseKind, load_object
from phases.playbook.schema import SCHEMA, LedgerSettings, PhaseSection, Playbook, Review
from phases.playbook.typed import json_schema, read, setting

# Keys of a phase that say who lets it through, not what it measures: changing one makes no pass stale.
_ABOUT_REVIEW = ("review", "four_eyes", "allow_yes", "signed_decisions", "allow_override")


@dataclasses.dataclass(frozen=True)
class _Gate:
    """The rules a phase must pass; the worst verdict decides."""

    rules: tuple[Node, ...] = setting(
        help="what the phase must keep to besides its own verdict; at least one, or leave `gate` out", not_empty=True
    )


@dataclasses.dataclass(frozen=True)
class _CommonPhaseKeys:
    gate: _Gate | None = setting(
        help="rules that make the gate stricter than the phase's own verdict", factory=lambda: None
    )
    review: Review = setting(Review.REQUIRED, help="required: a person approves before the next phase; none: go on")
    four_eyes: bool = setting(False, help="true: the one who ran the phase may not approve it")
    allow_yes: bool = setting(
        False,
        help="true: `phase run --yes` starts the phase without asking, and approves its passed gate for whoever runs it",
    )

    signed_decisions: bool = setting(
        False, help="true: a yes counts only with a signature that git verifies as that of the person it names"
    )
    allow_override: bool = setting(
        False,
        help="true: `phase gate override` may go on from an INCONCLUSIVE gate; it stays INCONCLUSIVE, and what is built on it says so",
    )

    def check(self, node: Node, mistakes: Mistakes) -> None:
        if self.allow_yes and self.four_eyes:
            mistakes.add(
                node.get("allow_yes") or node,
                f"{node.path}: four_eyes wants somebody else's approval, so allow_yes cannot give it",
            )


@dataclasses.dataclass(frozen=True)
class _Top:
    schema: str = setting(help=f"always {SCHEMA}", choices=(SCHEMA,))
    name: str = setting(
        help="short name of this playbook; locks and runs are called after it",
        pattern=r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
    )
    kernel: Path = setting(help="path of kernel.yaml, from the playbook's directory")
    phases: Node = setting(help="the phases to go through, in order")
    ledger: LedgerSettings = setting(help="where checkpoints are kept", factory=LedgerSettings)


def load(path: Path | str) -> Playbook:
    """Load a playbook. Raises PlaybookError that lists every mistake with file:line."""
    path = Path(path)
    mistakes = Mistakes()
    text, shown = read_text(path, mistakes)
    mistakes.raise_if_any("playbook")
    assert text is not None
    root = load_text(text, shown, mistakes)
    if not root.value:  # broken YAML, say: what it lacks is no news then
        mistakes.raise_if_any("playbook")
    playbook = _playbook(path, root, text, mistakes)
    mistakes.raise_if_any("playbook")
    return playbook


def _playbook(path: Path, root: Node, text: str, mistakes: Mistakes) -> Playbook:
    present = [key for key in SHARED_SECTIONS if root.get(key) is not None]
    _unknown_top_keys(root, mistakes)
    own = root.without(*(key for key, _ in root.items() if key not in _keys(_Top)))
    top = read(_Top, own, mistakes)
    kernel = (path.resolve().parent / top.kernel) if top.kernel else path
    there = _is_file(kernel)
    if top.kernel and not there:
        mistakes.add(root.get("kernel") or root, f"kernel: there is no file {top.kernel} (looked for {kernel})")
    phases = _phases(top.phases, mistakes) if top.phases else ()
    if top.phases:
        check_architectures(top.phases, mistakes)
        _missing_files(top.phases, path.resolve().parent, mistakes)
    if top.phases and there:
        _unknown_variants(top.phases, kernel, mistakes)
    sections = {key: _by_reader(SHARED_SECTIONS[key], root.get(key), key, mistakes) for key in present}
    production = root.get("production")
    if production is not None:
        _missing_files(production, path.resolve().parent, mistakes)
        phases = tuple(_bound(section, production) for section in phases)
    mistakes.raise_if_any("playbook")
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Playbook(
        top.name,
        path.resolve(),
        kernel.resolve(),
        top.ledger,
        phases,
        sections,
        digest,
        tuple(map(str, mistakes.notes)),
    )


def _bound(section: PhaseSection, production: Node) -> PhaseSection:
    """A production phase's pass is good for what it put into production, not for another candidate under the same rules."""
    if not section.kind.changes_production:
        return section
    served = {
        key: node.plain()
        for key in ("server", "incumbent", "candidate", "architectures")
        if (node := production.get(key))
    }
    text = section.digest + json.dumps(served, sort_keys=True)
    return dataclasses.replace(section, digest=hashlib.sha256(text.encode()).hexdigest())


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name too long, a directory one may not look into
        return False


def _missing_files(node: Node, folder: Path, mistakes: Mistakes) -> None:
    """Files and directories that a phase names, from the playbook's directory: `kernel`, `packages`, `prompts`, `anchors`."""
    for key, child in node.items():
        named = [child] if key in ("kernel", "prompts", "anchors") else child.elements() if key == "packages" else []
        for one in named:
            if one.kind == "text" and not _exists(folder / one.value):
                mistakes.add(one, f"{one.path}: there is no {one.value} (looked for {folder / one.value})")
        if not named:
            _missing_files(child, folder, mistakes)
    for element in node.elements():
        _missing_files(element, folder, mistakes)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _unknown_top_keys(root: Node, mistakes: Mistakes) -> None:
    known = [*_keys(_Top), *SHARED_SECTIONS]
    for key, _ in root.items():
        if key not in known:
            mistakes.add(root.keys[key], f"unknown key {key!r}{nearest(key, known)}")


def _unknown_variants(phases: Node, kernel: Path, mistakes: Mistakes) -> None:
    """Variants that Phase 1 or its rules name and kernel.yaml does not have: found out late, they cost minutes of measuring.

    What is wrong in kernel.yaml itself is for its own reader.
    """
    variants = load_file(kernel, Mistakes()).get("variants")
    phase = phases.get("build-parity")
    if not variants or not phase or not (known := [name for name, _ in variants.items()]):
        return
    gate = phase.get("gate")
    rules = gate.get("rules") if gate else None
    for holder in [phase.get("parity"), phase.get("benchmark"), *(rules.elements() if rules else ())]:
        if not holder:
            continue
        names = [node for key in ("baseline", "candidate", "variant") if (node := holder.get(key))]
        names += [
            node for key in ("variants", "may_refuse") if (listed := holder.get(key)) for node in listed.elements()
        ]
        for node in names:
            if isinstance(node.value, str) and node.value not in known:
                mistakes.add(
                    node, f"{node.path}: {kernel.name} has no variant {node.value!r}{nearest(node.value, known)}"
                )


def _keys(kind: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _phases(node: Node, mistakes: Mistakes) -> tuple[PhaseSection, ...]:
    if node.kind != "mapping" or not node.value:
        mistakes.add(node, f"phases: must be a mapping with at least one of {', '.join(PHASES)}, not {node.describe()}")
        return ()
    found: list[PhaseSection] = []
    for name, child in node.items():
        kind = PHASES.get(name)
        if kind is None:
            mistakes.add(node.keys[name], f"unknown phase {name!r}{nearest(name, PHASES)}")
            continue
        if found and kind.number < found[-1].kind.number:
            mistakes.add(
                node.keys[name], f"phase {name} stands after {found[-1].name}; the order is {', '.join(PHASES)}"
            )
        section = _phase(kind, child, mistakes)
        if section is not None:
            found.append(section)
    return tuple(found)


def _phase(kind: PhaseKind, node: Node, mistakes: Mistakes) -> PhaseSection | None:
    if node.kind != "mapping":
        mistakes.add(node, f"{node.path}: must be a mapping with the key 'gate', not {node.describe()}")
        return None
    common_keys = _keys(_CommonPhaseKeys)
    common = read(_CommonPhaseKeys, node.without(*(key for key, _ in node.items() if key not in common_keys)), mistakes)
    settings = _by_reader(kind.settings, node.without(*common_keys), node.path, mistakes, common_keys)
    rules = _rules(common.gate, mistakes)
    judged = json.dumps(node.without(*_ABOUT_REVIEW).plain(), sort_keys=True)
    digest = hashlib.sha256(judged.encode()).hexdigest()
    about_review = {name: getattr(common, name) for name in _ABOUT_REVIEW}
    return PhaseSection(kind=kind, rules=rules, settings=settings, where=str(node.where), digest=digest, **about_review)


def _rules(gate: _Gate | None, mistakes: Mistakes) -> tuple[Any, ...]:
    parse: Any = load_object(RULE_READER)
    parsed = [parse(rule, mistakes) for rule in (gate.rules if gate and gate.rules else ())]
    return tuple(rule for rule in parsed if rule is not None)


def _by_reader(reference: str, node: Node | None, what: str, mistakes: Mistakes, also: list[str] | None = None) -> Any:
    """Read a section by its dataclass; `also` are keys beside it that a misspelt key may have meant."""
    assert node is not None
    reader = load_object(reference)
    if reader is None:
        mistakes.add(node, f"{what}: this installation of phasegate does not have that part")
        return None
    for key in [key for key, _ in node.items() if also and key not in _keys(reader)]:
        guess = nearest(key, [*_keys(reader), *(also or [])])
        mistakes.add(node.keys[key], f"{node.path}: unknown key {key!r}{guess}")
        node = node.without(key)
    return read(reader, node, mistakes)


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a playbook, for editors: completion and checks while typing."""
    rule_schema: Any = load_object(RULE_SCHEMA)
    top = json_schema(_Top)
    phases: dict[str, Any] = {}
    for kind in PHASES.values():
        settings = _section_schema(kind.settings)
        if settings is None:
            continue
        common = json_schema(_CommonPhaseKeys)
        gate = json_schema(_Gate)
        gate["properties"]["rules"] = {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/rule"}}
        common["properties"]["gate"] = gate
        merged = {**common["properties"], **settings.get("properties", {})}
        phases[kind.name] = {
            "type": "object",
            "description": kind.proves,
            "properties": merged,
            "required": [*common.get("required", []), *settings.get("required", [])],
            "additionalProperties": settings.get("additionalProperties", True),
        }
    top["properties"]["phases"] = {
        "type": "object",
        "description": top["properties"]["phases"]["description"],
        "minProperties": 1,
        "properties": phases,
        "additionalProperties": False,
    }
    for key, reference in SHARED_SECTIONS.items():
        section = _section_schema(reference)
        if section is not None:
            top["properties"][key] = section
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "phasegate playbook",
        **top,
        "$defs": {"rule": rule_schema()},
    }


def _section_schema(reference: str) -> dict[str, Any] | None:
    """The schema of a section's dataclass; None where this installation lacks that part."""
    kind = load_object(reference)
    return None if kind is None else json_schema(kind)
