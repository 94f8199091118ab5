"""Is the candidate's kernel really active and used? SGLang only logs a plugin that fails to load, so it is checked.

Two sources that the kernel's plugin fills: a fact file per rank, and its entry in `/server_info`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from phases.base.errors import ServingError
from phases.serving.client import Client
from phases.serving.host import Server, ServingHost


@dataclass(frozen=True)
class Activity:
    """What the ranks say they do. Counts are sums over `counted` ranks: under tensor parallelism only one answers /server_info."""

    ranks: int
    counted: int
    variants: tuple[str, ...]
    builds: tuple[str, ...]
    verify_forwards: int
    kernel_calls: int
    incumbent_calls: int
    verify_seconds: float


def read_activity(client: Client, package: str) -> list[dict[str, Any]]:
    """The plugin's facts from /server_info, exact at this moment: one entry a scheduler that answers. [] without a plugin."""
    found: list[dict[str, Any]] = []
    for state in client.server_info().get("internal_states", []):
        found += state.get(package, []) or []
    return found


def identity(info: dict[str, Any]) -> dict[str, str]:
    """Model, SGLang's version and GPU of a server, as far as its /server_info says."""
    found = {"model": info.get("model_path"), "sglang": info.get("version")}
    for state in info.get("internal_states") or []:
        for entries in state.values() if isinstance(state, dict) else ():
            if isinstance(entries, list) and entries and isinstance(entries[0], dict) and entries[0].get("gpu"):
                found["gpu"] = entries[0]["gpu"]
    return {key: str(value) for key, value in found.items() if value}


def summarize(facts: list[dict[str, Any]]) -> Activity:
    counters = [entry["counters"] for entry in facts]
    return Activity(
        ranks=sum(entry.get("ranks", 1) for entry in facts if entry.get("rank", 0) == 0) or len(facts),
        counted=len(facts),
        variants=tuple(sorted({entry["variant"] for entry in facts})),
        builds=tuple(sorted({entry["build"] for entry in facts})),
        verify_forwards=sum(c["verify_forwards"] for c in counters),
        kernel_calls=sum(c["verify_calls"] for c in counters),
        incumbent_calls=sum(c["incumbent_calls"] for c in counters),
        verify_seconds=sum(c["verify_seconds"] for c in counters),
    )


def inactive(host: ServingHost, server: Server, client: Client, package: str, backend: str, release: str) -> str:
    """Why the candidate's kernel is not what serves, or "". Asked after requests were completed."""
    live = [entry for entry in read_activity(client, package) if entry.get("backend") == backend]
    files = [entry for entry in host.read_facts(server) if entry.get("backend") == backend]
    if not live and not files:
        return f"no rank of {server.name} reports backend {backend}: the plugin is not active"
    if not files:
        return f"{server.name} wrote no fact file below {server.facts}"
    ranks = files[0].get("ranks", 1)
    if len(files) != ranks:
        return f"{len(files)} of {ranks} ranks of {server.name} wrote a fact file"
    for entry in files:
        if entry.get("release") != release:
            return (
                f"rank {entry.get('rank')} runs release {str(entry.get('release'))[:12] or 'none'}, not {release[:12]}"
            )
    used = summarize(live or files)
    if used.verify_forwards == 0:
        return f"{server.name} verified no tree: is speculation on?"
    if used.kernel_calls == 0:
        return f"{server.name} verified {used.verify_forwards} trees, none of them with the kernel"
    for entry in [*live, *files]:  # of every rank: the files know those that do not answer
        if calls := entry["counters"]["incumbent_calls"]:
            return f"rank {entry.get('rank')} of {server.name} ran {calls} of its verify layers with the incumbent's attention"
    return ""


def read_metrics(client: Client, names: tuple[str, ...]) -> dict[str, float]:
    """The named series of /metrics, summed over their labels.

    Raises:
        ServingError: a name that this SGLang does not export: names change between versions, and a missing one is no zero.
    """
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(client.metrics()):
        for sample in family.samples:
            if sample.name in names:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    missing = [name for name in names if name not in found]
    if missing:
        raise ServingError(
            f"{client.name} exports no {', '.join(missing)} in /metrics.", hint="Was it started with --enable-metrics?"
        )
    return found
