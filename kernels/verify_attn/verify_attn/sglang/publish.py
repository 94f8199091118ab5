"""What SGLang lets a plugin show over HTTP: an entry in `/server_info` and series in `/metrics`."""

from __future__ import annotations

import logging
import os

log = logging.getLogger(__name__)
_backends: list = []  # of this scheduler process: the target's, then the draft's


def add(backend) -> None:
    _backends.append(backend)


def hook_server_info() -> None:
    """Add `verify_attn: [facts, ...]` to each rank's entry of `internal_states` in `GET /server_info`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state"
    HookRegistry.register(target, _with_facts, HookType.AFTER)


def _with_facts(result, *args, **kwargs):
    try:
        result.internal_state["verify_attn"] = [backend.facts() for backend in _backends]
    except Exception:  # a status page must not end a scheduler
        log.exception("verify_attn: cannot add its facts to /server_info")
    return result


class Metrics:
    """Series `verify_attn_*` in SGLang's `/metrics`, which collects every process's series when it was started with
    --enable-metrics (prometheus_client's multi-process mode)."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._calls = self._forwards = None
        if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            return
        from prometheus_client import Counter, Gauge

        names = sorted(labels)
        values = [labels[name] for name in names]
        self._calls = Counter("verify_attn_calls", "Tree-verify attention layers run by our kernel", names).labels(*values)
        self._forwards = Counter("verify_attn_verify_forwards", "Tree-verify forwards", names).labels(*values)
        info = Gauge("verify_attn_info", "1 while the backend is active", names, multiprocess_mode="liveall")
        info.labels(*values).set(1)
        self._seen = (0, 0)

    def update(self, calls: int, forwards: int) -> None:
        if self._calls is None:
            return
        self._calls.inc(max(calls - self._seen[0], 0))
        self._forwards.inc(max(forwards - self._seen[1], 0))
        self._seen = (calls, forwards)
