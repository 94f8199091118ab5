"""The repository that `phase demo` works in: a kernel without anything in it, and a playbook for each way a candidate can be.

It is an ordinary one: `phase run`, `phase rollback`, kills and suspensions do in it what they do elsewhere.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from phases.base.errors import UsageError
from phases.ledger.git import Git

MARK = "demo-README.md"
# Of the demo's repository: whoever tries it is asked for no key, and their own settings change no file.
_SETTINGS = {
    "user.name": "phase demo",
    "user.email": "demo@localhost",
    "commit.gpgSign": "false",
    "tag.gpgSign": "false",
    "core.autocrlf": "false",
    "core.safecrlf": "false",
}
_KERNEL = {
    "kernel.yaml": """\
        schema: phasegate/kernel/v1
        name: NAME
        package: NAME
        path: .
        entry: NAME
        variants:
          plain: {role: baseline, device: any}
        architectures: []
        parity:
          tolerances: {float32: 1.0e-5}
        sglang: {backend: NAME_candidate}
        """,
    "NAME.py": """\
        # A kernel without anything in it: what is shown here is how one travels to production and back.
        def inputs(case, seed, device): return {}
        def outputs(case, device): return {}
        def reference(case, inputs): return {}
        def run(variant, case, inputs, outputs): pass
        def cost(case): return {"bytes": 1, "flops": 1}
        """,
    "pyproject.toml": """\
        [build-system]
        requires = ["setuptools"]
        build-backend = "setuptools.build_meta"

        [project]
        name = "NAME"
        version = "1"

        [tool.setuptools]
        py-modules = ["NAME"]
        """,
}
IGNORED = ".phase/\n__pycache__/\n[0-9][0-9][0-9][0-9]-*-*.html\n"

# What is wrong with a candidate, as the stand-in worker takes it from the environment of its release.
CANDIDATES: dict[str, tuple[str, dict[str, str]]] = {
    "playbook": ("well, and a little faster than the incumbent", {"STANDIN_SLOW": "9"}),
    "slow": ("three times slower", {"STANDIN_SLOW": "30"}),
    "wrong": ("right at first, then its outputs are not the incumbent's any more", {"STANDIN_WRONG": "4"}),
    "wedged": ("answers /health and nothing else after its first requests", {"STANDIN_WEDGED_AFTER": "60"}),
    "not-starting": ("ends as soon as it starts", {"STANDIN_CRASH": "1"}),
}

PLAYBOOK = """\
# {what}.
# The fleet is the same for all playbooks here: four stand-in workers on this machine behind a real sglang-router.
schema: phasegate/playbook/v1
name: demo
kernel: kernel.yaml

embedded_fleet:
  workers: [{{count: 4}}]
  ready: 60
  drain: 10
  lease: 30

production:
  server: {{python: stand-in, model: stand-in, arguments: ["--skip-tokenizer-init"], request_timeout: 20}}
  incumbent: {{backend: demo_incumbent, environment: {{STANDIN_SLOW: "10"}}}}
  candidate: {{backend: demo_candidate, environment: {candidate}}}
  min_available: {{count: 2}}
  load: {{rate: 20, tokens: 8}}           # the users
  agreement: {{prompts: 2, tokens: 4, every: 5}}
  warm_up: {{requests: 3, agree: 0.6, sweeps: 6}}

watch:
  interval: 5
  judge: &judge {{metrics: [{{metric: e2e, quantile: 0.5, margin: 0.3}}], window: 1, bake: 12, deadline: 60, min_samples: 60,
                 settle: 1, probes: 15, error_tolerance: 0.1}}

phases:
  tp8-canary:
    review: none
    allow_yes: true
    canary: {{count: 1}}
    control: {{count: 1}}
    judge: *judge
    gate: {{rules: [{{rule: measurement, metric: 5xx_excess_rate, at_most: 0.1, absent: inconclusive}}]}}
  full-rollout:
    review: none
    allow_yes: true
    waves: [{{count: 1}}, {{percent: 100}}]
    soak: 12
    judge: *judge
    gate: {{rules: [{{rule: measurement, metric: failed_requests, at_most: 0, absent: fail}}]}}
"""

README = """\
# A fleet to try phasegate on

Four stand-in workers behind a real sglang-router, on this machine. Try, in this directory:

    phase status                                  what is live where
    phase run --yes                               the good candidate: canary, then the whole fleet
    phase rollback                                back to the release before
    phase run tp8-canary --yes -p slow.yaml       one that regresses: goes back by itself, exit 7
    phase watch                                   judge production again and again

{candidates}
Kill or suspend what you like (`kill -9`, `kill -STOP` of a run or of a worker), then look at `phase status` and go on with
`phase run --resume`. `phase fleet down --purge` ends the fleet.
"""


def empty_kernel(name: str) -> dict[str, str]:
    """Files of a kernel without anything in it, path to text: enough for releases that travel."""
    return {path.replace("NAME", name): textwrap.dedent(text).replace("NAME", name) for path, text in _KERNEL.items()}


def make(directory: Path) -> None:
    """Write and commit the repository. Again: does nothing where it is there already.

    Raises:
        UsageError: the directory holds something else. LedgerError: git refuses.
    """
    if (directory / MARK).exists():
        return
    if directory.exists() and any(directory.iterdir()):
        raise UsageError(
            f"{directory} holds something else than the demo.", hint="Name another directory: `phase demo DIRECTORY`."
        )
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in {**empty_kernel("demo"), ".gitignore": IGNORED}.items():
        (directory / path).write_text(text)
    for name, (what, environment) in CANDIDATES.items():
        text = PLAYBOOK.format(what=f"A candidate that is {what}", candidate=json.dumps(environment))
        (directory / f"{name}.yaml").write_text(text)
    git = Git(directory)
    git.run("init", "-q", "-b", "main", "--template=")
    for key, value in _SETTINGS.items():
        git.run("config", key, value)
    rows = "".join(f"- `{name}.yaml`: a candidate that is {what}\n" for name, (what, _) in CANDIDATES.items())
    (directory / MARK).write_text(README.format(candidates=rows))
    git.run("add", "--force", ".")
    git.run("commit", "-qm", "The demo")
