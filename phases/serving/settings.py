"""Playbook settings of Phase 2, `sglang-integration`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phases.playbook.located import Mistakes, Node
from phases.playbook.typed import setting
from phases.serving.flags import refused

EMBEDDED = "embedded"
OWN_FLAGS = ("--attention-backend", "--port", "--host", "--model-path", "--model")


@dataclass(frozen=True)
class ServerSettings:
    """What both servers share: the environment, the model, the flags."""

    python: str = setting(
        EMBEDDED,
        help="Python of the serving environment; `embedded`: SGLang on the CPU, provisioned on first use; "
        "`stand-in`: workers without a model, to try phasegate itself",
    )
    model: str = setting("", help="model path; empty: the embedded environment's small MLA model")
    draft_model: str = setting(
        "", help="draft model path, put after --speculative-draft-model-path; empty: the embedded one"
    )
    device: str = setting("cpu", choices=("cpu", "cuda"), help="where the servers run")
    listen: str = setting(
        "127.0.0.1",
        pattern=r"[0-9A-Fa-f.:]+",
        help="address the servers listen on; 0.0.0.0 for workers that a router on another machine sends to",
    )
    arguments: tuple[str, ...] = setting(
        (), help="launch flags of both servers; none: speculation by a draft model, top-k 4"
    )
    environment: dict[str, str] = setting(factory=dict, help="environment variables of both servers")
    ready_within: float = setting(
        300.0, duration=True, above=0, help="a server that does not complete requests by then has failed"
    )
    request_timeout: float = setting(120.0, duration=True, above=0, help="limit on one request")

    def check(self, node: Node, mistakes: Mistakes) -> None:
        _no_own_flags(self.arguments, node, mistakes)
        if self.python != EMBEDDED and not self.model:
            mistakes.add(node, f"{node.path}: key 'model' is missing (only the embedded environment brings a model)")


@dataclass(frozen=True)
class SideSettings:
    """One of the two servers that are compared."""

    backend: str = setting("", help="SGLang attention backend; the candidate's default is the backend of kernel.yaml")
    kernel: Path | None = setting(
        None, help="kernel.yaml (or its directory) whose release this server gets; none: the playbook's kernel"
    )
    packages: tuple[Path, ...] = setting(
        (), help="directories of further Python distributions (a pyproject.toml each) whose wheels go into its release"
    )
    release: bool = setting(
        True, help="false: the server gets no release, for a backend that SGLang itself has, such as triton"
    )
    arguments: tuple[str, ...] = setting((), help="flags of this server alone")
    environment: dict[str, str] = setting(factory=dict, help="environment variables of this server alone")
    port: int = setting(0, at_least=0, at_most=65535, help="0: any free port")
    ready_within: float | None = setting(
        None, duration=True, above=0, help="another limit than server.ready_within for this server"
    )

    def check(self, node: Node, mistakes: Mistakes) -> None:
        _no_own_flags(self.arguments, node, mistakes)


@dataclass(frozen=True)
class OutputSettings:
    """How outputs are compared."""

    prompts: Path | None = setting(
        None, help="JSON list of {name, kind, text} and, for a long one, repeat; none: the built-in set"
    )
    tokens: int = setting(32, at_least=4, help="tokens generated a prompt")
    concurrency: tuple[int, ...] = setting((1, 16), not_empty=True, help="requests in flight, each level compared")
    tie: float = setting(
        0.02, at_least=0, help="a token whose log-probability is this close to the best one is as good as it"
    )


@dataclass(frozen=True)
class LatencySettings:
    """Paired, interleaved timing."""

    pairs: int = setting(12, at_least=3, help="prompts timed on both servers, in random order")
    tokens: int = setting(40, at_least=8, help="tokens generated a prompt")
    prompt_tokens: int = setting(1000, at_least=16, help="length of each prompt, about")


@dataclass(frozen=True)
class IntegrationSettings:
    """Phase 2: the kernel inside a real SGLang server, beside the incumbent."""

    server: ServerSettings = setting(help="what both servers share", factory=ServerSettings)
    incumbent: SideSettings = setting(help="what production runs today", factory=SideSettings)
    candidate: SideSettings = setting(help="what it is to run", factory=SideSettings)
    architectures: tuple[str, ...] = setting(
        (), help="objects the releases carry; none: those of kernel.yaml for the device"
    )
    output: OutputSettings = setting(help="output comparison", factory=OutputSettings)
    latency: LatencySettings = setting(help="latency comparison", factory=LatencySettings)

    def check(self, node: Node, mistakes: Mistakes) -> None:
        if not self.incumbent.backend:
            mistakes.add(
                node.get("incumbent") or node,
                f"{node.path}: key 'incumbent.backend' is missing (what production runs today)",
            )
        check_flags(self.server, {"incumbent": self.incumbent, "candidate": self.candidate}, node, mistakes)
        if self.candidate.port and self.candidate.port == self.incumbent.port:
            mistakes.add(
                node.get("candidate") or node,
                f"{node.path}: candidate.port is the incumbent's; give another, or 0 for any",
            )
        if not self.candidate.release:
            mistakes.add(
                node.get("candidate") or node,
                f"{node.path}: candidate.release cannot be false: the release is what is proved",
            )


def check_flags(server: ServerSettings, sides: dict[str, SideSettings], node: Node, mistakes: Mistakes) -> None:
    """That each side's flags and backend go together; a candidate without a backend has its kernel's own."""
    for name, side in sides.items():
        backend = side.backend or "the kernel's own backend"
        if reason := refused((*server.arguments, *side.arguments), backend):
            where = node.get(name) if side.arguments else node.get("server")
            mistakes.add(where or node, f"{node.path}: {name}: {reason}")


def _no_own_flags(arguments: tuple[str, ...], node: Node, mistakes: Mistakes) -> None:
    for argument in arguments:
        name = argument.partition("=")[0]
        if name in OWN_FLAGS:
            mistakes.add(
                node.get("arguments") or node,
                f"{node.path}: {name} is set by the phase itself; leave it out of 'arguments'",
            )
