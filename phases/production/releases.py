"""The two releases production knows: the incumbent's and the candidate's, with the launch arguments of a fleet's workers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phases.base.errors import PlaybookError
from phases.base.results import BuildRecord
from phases.build_parity.steps import build_cache
from phases.engines.embedded.fleet import LAUNCH_ENVIRONMENT, launch_arguments
from phases.engines.ssh.bundle import Bundle, Launch, make_bundle
from phases.engines.ssh.host import Host
from phases.harness import contract
from phases.harness.contract import Kernel
from phases.production.settings import ProductionSettings
from phases.serving.launch import server_argv, server_environment
from phases.serving.release import OBJECTS, SITE, make_release, variable
from phases.serving.settings import EMBEDDED, SideSettings

SIDES = ("incumbent", "candidate")
Built = tuple[Bundle, tuple[BuildRecord, ...]]  # what `make_release` returns


@dataclass(frozen=True)
class Launched:
    """What the launch functions of Phase 2 read: settings with `server`, `incumbent`, `candidate`, and the kernel."""

    settings: ProductionSettings
    kernel: Kernel


def require_values(settings: ProductionSettings, workers: Sequence[Host]) -> None:
    """PlaybookError where launch arguments or variables name what a worker has no value for: SGLang would be given the name.

    Of the playbook's own, a {name} that no worker has is left as it is: braces may stand there for something else.
    """
    server, known = settings.server, dict.fromkeys(name for host in workers for name in host.values)
    own = [
        text
        for part in (server, settings.incumbent, settings.candidate)
        for text in (*part.arguments, *part.environment.values())
    ]
    text = " ".join([server.python, server.model, server.draft_model, *own])
    named = [name for name in known if f"{{{name}}}" in text]
    why, hint = "`production: server`", "Give them under `vars` of the host."
    if settings.server.python == EMBEDDED:
        named += re.findall(r"{(\w+)}", " ".join([*launch_arguments(), *LAUNCH_ENVIRONMENT.values()]))
        why, hint = (
            "`server.python: embedded`",
            "Give them under `vars` of the host, name a Python of your own there, or use `embedded_fleet`.",
        )
    for host in workers:
        if missing := [name for name in dict.fromkeys(named) if name not in host.values]:
            raise PlaybookError(f"{why} needs values of {host.name} for {', '.join(missing)}.", hint=hint)


def fleet_releases(
    settings: ProductionSettings,
    kernel: Kernel,
    environment: dict[str, Any],
    progress: Callable[[str], None],
    folder: Path = Path(),
    sides: Sequence[str] = SIDES,
) -> dict[str, Bundle]:
    """The sides' bundles. The launch arguments hold {port} and the hosts' own values, filled in on each host.

    Args:
        environment: python, model and draft_model as the workers' hosts have them.
        folder: where the playbook lies: its paths count from there.
    Raises:
        BuildError: a release does not build.
    """
    built: dict[object, Built] = {}
    return {side: _release(settings, kernel, side, environment, progress, folder, built) for side in sides}


def _release(
    settings: ProductionSettings,
    kernel: Kernel,
    side: str,
    environment: dict[str, Any],
    progress: Callable[[str], None],
    folder: Path,
    built: dict[object, Built],
) -> Bundle:
    own: SideSettings = getattr(settings, side)
    served = contract.load(folder / own.kernel) if own.kernel else kernel
    archs, packages = (
        settings.architectures or _architectures(settings, served),
        [folder / path for path in own.packages],
    )
    same = (served.file, tuple(archs), tuple(packages))
    if same not in built:  # the sides mostly differ in how they are launched only
        built[same] = make_release(served, archs, build_cache(served), progress, packages)
    bundle, records = built[same]
    launched = Launched(settings, served)
    release = {"path": "{release}", "digest": ""}
    argv = [str(part) for part in server_argv(launched, side, environment, "{port}")]  # type: ignore[arg-type]
    env = server_environment(launched, side, release, environment)  # type: ignore[arg-type]
    env.pop("PYTHONPATH"), env.pop("PATH_PREFIX")
    env |= {
        "PATH": f"{Path(environment['python']).parent}:/usr/local/bin:/usr/bin:/bin",
        variable(served, "FACTS"): "{root}/facts",
        variable(served, "CONTROL"): "{root}/control",
    }
    env.pop(variable(served, "RELEASE"))  # the host gives the digest, which covers these very arguments
    if settings.server.python == EMBEDDED:
        argv += launch_arguments()
        env |= LAUNCH_ENVIRONMENT
    facts = {"kernel": served.name, "side": side, "archs": sorted({record.arch for record in records})}
    files = {file.path: file.source for file in bundle.files}
    made = make_bundle(files, Launch(tuple(argv), env, SITE), facts)
    progress(f"{side}: release {made.digest[:12]}, {made.size >> 10} KiB, objects in {OBJECTS}/")
    return made


def _architectures(settings: ProductionSettings, kernel: Kernel) -> tuple[str, ...]:
    cuda = settings.server.device == "cuda"
    return tuple(arch for arch in kernel.architectures if arch.startswith("sm_") == cuda)
