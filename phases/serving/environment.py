"""The serving environment a playbook's `server` names: the embedded one, provisioned here, or one that is there already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phases.engines.embedded.provision import cache_directory, ensure
from phases.engines.embedded.stand_in import STAND_IN, stand_in_facts
from phases.serving.settings import EMBEDDED, ServerSettings


def environment_facts(server: ServerSettings, progress: Callable[[str], None]) -> dict[str, Any]:
    """Python, model and draft model; for the embedded environment also what it cost, its digest and the models it need not import."""
    if server.python == STAND_IN:
        return stand_in_facts(cache_directory())
    if server.python != EMBEDDED:
        return {"python": server.python, "model": server.model, "draft_model": server.draft_model}
    made = ensure(progress=progress)
    facts = {"python": str(made.python), "model": str(made.target_model), "draft_model": str(made.draft_model)}
    facts |= {"digest": made.digest, "seconds": made.seconds, "bytes": made.bytes, "unused_models": made.unused_models}
    return facts | {key: value for key in ("model", "draft_model") if (value := getattr(server, key))}
