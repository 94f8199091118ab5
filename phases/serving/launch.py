"""Launch flags and environment of the two servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phases.run.phase_run import PhaseRun
from phases.serving.release import OBJECTS, SITE, object_variables, variable
from phases.serving.settings import EMBEDDED, IntegrationSettings, SideSettings

# What the embedded CPU environment needs, and speculation that builds real trees from its draft model.
EMBEDDED_FLAGS = (
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--disable-cuda-graph",
    "--mem-fraction-static",
    "0.1",
    "--max-total-tokens",
    "32768",
    "--max-running-requests",
    "32",
    "--sleep-on-idle",
)
TREE_FLAGS = (
    "--speculative-algorithm",
    "STANDALONE",
    "--speculative-num-steps",
    "3",
    "--speculative-eagle-topk",
    "4",
    "--speculative-num-draft-tokens",
    "8",
)
EMBEDDED_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
DRAFT_FLAG = "--speculative-draft-model-path"


def server_argv(run: PhaseRun, side: str, environment: dict[str, Any], port: int) -> list[str]:
    """The command of one server. Both get the same flags but for backend, port and their own `arguments`.

    Args:
        environment: facts of the provisioning step: python, model, draft_model.
    """
    settings: IntegrationSettings = run.settings
    own: SideSettings = getattr(settings, side)
    shared = list(settings.server.arguments or TREE_FLAGS)
    if settings.server.python == EMBEDDED:
        shared = [*EMBEDDED_FLAGS, *shared]
    needs_draft = any(flag in shared for flag in ("STANDALONE", "EAGLE", "EAGLE3")) and DRAFT_FLAG not in shared
    if needs_draft and environment.get("draft_model"):
        shared += [DRAFT_FLAG, environment["draft_model"]]
    return [
        environment["python"],
        "-m",
        "sglang.launch_server",
        "--model-path",
        environment["model"],
        "--attention-backend",
        own.backend or run.kernel.backend,
        "--host",
        settings.server.listen,
        "--port",
        str(port),
        "--enable-metrics",
        *shared,
        *own.arguments,
    ]


def server_environment(
    run: PhaseRun, side: str, release: dict[str, Any] | None, environment: dict[str, Any]
) -> dict[str, str]:
    """Environment variables of one server: its release on PYTHONPATH, and where its kernel finds objects and puts facts.

    Args:
        release: digest and path; None for a server without one.
    """
    settings: IntegrationSettings = run.settings
    variables = {"PATH_PREFIX": str(Path(environment["python"]).parent), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if release:
        path = Path(release["path"])
        variables |= {
            "PYTHONPATH": str(path / SITE),
            **object_variables(run.kernel, str(path / OBJECTS)),
            variable(run.kernel, "RELEASE"): release["digest"],
            variable(run.kernel, "FACTS"): "{facts}",
        }
    if settings.server.python == EMBEDDED:
        variables |= EMBEDDED_ENVIRONMENT | unused_models_variable(environment["unused_models"])
    return {**variables, **settings.server.environment, **getattr(settings, side).environment}


def unused_models_variable(names: list[str]) -> dict[str, str]:
    """What keeps SGLang from importing models that are not served."""
    return {"SGLANG_DISABLED_MODEL_ARCHS": ",".join(names)}
