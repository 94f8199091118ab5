"""What moved in the gate between two checkpoints of a phase, one line a thing, in the manner of `terraform plan`; loosening is marked.

A reviewer must not have to look for a threshold that fell or a case that is no longer proved: they stand above everything else.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phases.base.results import Results
from phases.gate.outcome import GateOutcome, RuleOutcome
from phases.ledger.checkpoint import Checkpoint

PLAYBOOK = "playbook.yaml"  # the playbook's text, as a checkpoint keeps it
_FLOORS = ("speedup", "longest_prefix", "bandwidth_fraction")
_CEILINGS = ("parity",)
_OF_ATTEMPTS = (("kernel_digest", "the kernel's files"), ("section_digest", "this phase's section of the playbook"))


@dataclass(frozen=True)
class Move:
    """One thing that is no more (`-`), new (`+`) or changed (`~`). `looser`: more passes than before; None where that cannot be told."""

    sign: str
    what: str
    looser: bool | None

    def __str__(self) -> str:
        mark = {True: " (looser)", False: "", None: " (looser or not: read it)"}[self.looser]
        return f"{self.sign} {self.what}{mark}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def moves(before: tuple[GateOutcome, Results], after: tuple[GateOutcome, Results]) -> tuple[Move, ...]:
    """Everything that moved in rules, parity cases and benchmark cases; what is looser first."""
    (old_gate, old), (new_gate, new) = before, after
    found = [
        *_rules(old_gate.rules, new_gate.rules),
        *_cases("parity", old.parity, new.parity),
        *_cases("benchmark", old.benchmark, new.benchmark),
    ]
    return tuple(sorted(found, key=lambda move: (move.looser is False, "-~+".index(move.sign))))


def playbook_diff(before: bytes | None, after: bytes | None) -> str:
    """A unified diff of two playbooks; empty where they are the same, or where a checkpoint, older than this, kept no text."""
    if before is None or after is None:
        return ""
    old, new = (text.decode(errors="replace").splitlines() for text in (before, after))
    return "\n".join(difflib.unified_diff(old, new, "playbook as approved", "playbook now", n=2, lineterm=""))


def attempts(earlier: Sequence[Checkpoint], manifest: dict[str, Any]) -> tuple[str, ...]:
    """The checkpoints of the phase that lie between the last approved one and this one, and what changed from each to the next.

    Args:
        earlier: those that lie between, oldest first. manifest: of the checkpoint that is looked at.
    """
    if not earlier:
        return ()
    numbers = [checkpoint.number for checkpoint in earlier]
    verdicts = ", ".join(checkpoint.verdict.value for checkpoint in earlier)
    head = (
        f"attempts before this one: {verdicts} ({', '.join(f'{n:04d}' for n in numbers)})"
        if len(earlier) > 1
        else f"attempt before this one: {verdicts} ({numbers[0]:04d})"
    )
    manifests = [*(checkpoint.manifest for checkpoint in earlier), manifest]
    names = [*(f"{n:04d}" for n in numbers), "this one"]
    steps = [
        f"{a} → {b}: {', '.join(_between(x, y)) or 'nothing changed: the same was tried again'}"
        for a, b, x, y in zip(names, names[1:], manifests, manifests[1:])
    ]
    return (head, *steps)


def _between(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    before, after = old["source"].get("commit"), new["source"].get("commit")
    if before != after:
        yield f"commit {str(before)[:10]} → {str(after)[:10]}"
    elif old["source"].get("difference") != new["source"].get("difference"):
        yield "uncommitted changes"
    for name, words in _OF_ATTEMPTS:
        if old.get("facts", {}).get(name) != new.get("facts", {}).get(name):
            yield words
    if old.get("playbook") != new.get("playbook") and old["facts"].get("section_digest") == new["facts"].get(
        "section_digest"
    ):
        yield "other sections of the playbook"


def _rules(old: Sequence[RuleOutcome], new: Sequence[RuleOutcome]) -> Iterator[Move]:
    before, after = _by_name(old), _by_name(new)
    for name, rule in before.items():
        now = after.get(name)
        if now is None:
            yield Move("-", f"rule {name}", True)
        elif rule.threshold != now.threshold:
            yield _threshold(name, rule, now)
    for name, rule in after.items():
        if name not in before:
            limit = "" if rule.threshold is None else f" {_bound(rule) or 'threshold'} {rule.threshold:g}"
            yield Move("+", f"rule {name}{limit}", False)


def _threshold(name: str, old: RuleOutcome, new: RuleOutcome) -> Move:
    bound = _bound(new) or _bound(old)
    then, now = ("none" if rule.threshold is None else f"{rule.threshold:g}" for rule in (old, new))
    looser: bool | None = None
    if new.threshold is None:
        looser = True
    elif old.threshold is None:
        looser = False
    elif bound:
        looser = (new.threshold < old.threshold) is (bound == "at_least")
    return Move("~", f"{name} {bound or 'threshold'} {then} → {now}", looser)


def _bound(rule: RuleOutcome) -> str:
    """Which side its threshold limits; empty where an older checkpoint does not say."""
    if rule.rule in _FLOORS or rule.rule in _CEILINGS:
        return "at_least" if rule.rule in _FLOORS else "at_most"
    said = rule.detail.get("bound")
    if said in ("at_least", "at_most"):
        return str(said)
    if rule.reason.startswith(("lower bound", "upper bound")):  # how the two directions tell a PASS and a FAIL
        return "at_least" if (" reaches " in rule.reason or " is under " in rule.reason) else "at_most"
    return ""


def _by_name(rules: Iterable[RuleOutcome]) -> dict[str, RuleOutcome]:
    """Rules by what people call them; a second one of the same name is numbered."""
    found: dict[str, RuleOutcome] = {}
    for rule in rules:
        name = base = rule.label
        number = 2
        while name in found:
            name, number = f"{base} #{number}", number + 1
        found[name] = rule
    return found


def _cases(kind: str, old: Iterable[Any], new: Iterable[Any]) -> Iterator[Move]:
    """Cases gone or new; of a case that stays, variants gone or new."""
    before, after = _variants(old), _variants(new)
    for case in dict.fromkeys([*before, *after]):
        then, now = before.get(case), after.get(case)
        if then is None or now is None:
            yield Move("-" if now is None else "+", f"{kind} {case}", now is None)
            continue
        yield from (Move("-", f"{kind} {case} of {variant}", True) for variant in then if variant not in now)
        yield from (Move("+", f"{kind} {case} of {variant}", False) for variant in now if variant not in then)


def _variants(records: Iterable[Any]) -> dict[str, dict[str, None]]:
    """Variants that were proved or timed, by case; one that refused a case has not been."""
    found: dict[str, dict[str, None]] = {}
    for record in records:
        if not record.refused:
            found.setdefault(record.case.key, {})[record.variant] = None
    return found
