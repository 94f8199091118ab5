"""An in-toto statement with a SLSA v1 provenance predicate for one checkpoint.

Formats: in-toto Attestation Framework, Statement v1; SLSA Provenance v1 (slsa.dev/spec/v1.0/provenance).
"""

from __future__ import annotations

from typing import Any

from phases import __version__
from phases.ledger.checkpoint import Draft, canonical_json, iso, sha256

_BUILD_TYPE = "urn:phasegate:phase:v1"


def statement(draft: Draft, started_at: float) -> bytes:
    """The statement: every file of the draft is a subject, the source commit a resolved dependency."""
    commit = draft.source.get("commit")
    dependencies: list[dict[str, Any]] = []
    if commit:
        dependencies.append({"name": "source", "digest": {"gitCommit": commit}})
    for record in draft.facts.get("artifacts", []):
        dependencies.append({"name": record["name"], "digest": {"sha256": record["sha256"]}})
    return canonical_json(
        {
            "_type": "https://in-toto.io/Statement/v1",
            "subject": [
                {"name": path, "digest": {"sha256": sha256(data)}} for path, data in sorted(draft.files.items())
            ],
            "predicateType": "https://slsa.dev/provenance/v1",
            "predicate": {
                "buildDefinition": {
                    "buildType": _BUILD_TYPE,
                    "externalParameters": {"phase": draft.phase, "kernel": draft.kernel, "playbook": draft.playbook},
                    "internalParameters": {
                        "dirty": draft.source.get("dirty"),
                        "difference": draft.source.get("difference"),
                    },
                    "resolvedDependencies": dependencies,
                },
                "runDetails": {
                    "builder": {"id": "urn:phasegate:toolkit", "version": {"phasegate": __version__}},
                    "metadata": {
                        "invocationId": draft.run,
                        "startedOn": iso(started_at),
                        "finishedOn": iso(draft.recorded_at),
                    },
                },
            },
        }
    )
