"""The two distributions as people get them: wheels in a fresh environment outside of the clone, with nothing of the clone on the path."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

TOP = Path(__file__).resolve().parents[2]
LAPTOP = Path(__file__).with_name("laptop.py")
MOST_MIB = 300
KERNEL = "kernels/verify_attn"

pytestmark = pytest.mark.slow


class Environment:
    """A virtual environment, and commands in it as a user far from the clone has them: another home, LANG=C, umask 077."""

    def __init__(self, root: Path) -> None:
        self.root, self.python = root, root / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True)
        self.packages = next(root.glob("lib/python*/site-packages"))

    def pip(self, *arguments: object) -> None:
        argv = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "--python", self.python, *arguments]
        done = subprocess.run(list(map(str, argv)), cwd=self.root, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def run(self, argv: list[object], cwd: Path, code: int = 0) -> str:
        home = self.root / "home"
        home.mkdir(exist_ok=True)
        environment = {
            "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}",
            "HOME": str(home),
            "LANG": "C",
            "GIT_AUTHOR_NAME": "Ada",
            "GIT_AUTHOR_EMAIL": "ada@example.org",
            "GIT_COMMITTER_NAME": "Ada",
            "GIT_COMMITTER_EMAIL": "ada@example.org",
        }
        done = subprocess.run(
            list(map(str, argv)),
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            umask=0o077,
            check=False,
        )
        assert done.returncode == code and "Traceback" not in done.stdout, f"{argv}: {done.returncode}\n{done.stdout}"
        return done.stdout

    def phase(self, cwd: Path, *arguments: object, code: int = 0) -> str:
        return self.run([self.root / "bin" / "phase", *arguments], cwd, code)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both, built from a copy of what git tracks: nothing that only lies about in this clone gets into them."""
    source = tmp_path_factory.mktemp("source")
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TOP / name, source / name)
    return build(tmp_path_factory.mktemp("wheels"), source, source / KERNEL)


def build(into: Path, *sources: Path) -> dict[str, Path]:
    """Wheels by the distribution's name."""
    argv = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", into, *sources]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.name.partition("-")[0]: path for path in into.glob("*.whl")}


def test_the_dockerfile_copies_what_the_wheel_is_built_from(wheels: dict[str, Path], tmp_path: Path) -> None:
    """Its first stage, as far as it goes without a container: COPY, then the same wheel."""
    first = (TOP / "Dockerfile").read_text().split("\nFROM ")[1]
    kept = [line[1:] for line in (TOP / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for *sources, target in (line.split()[1:] for line in first.splitlines() if line.startswith("COPY ")):
        for source in sources:
            assert source.split("/")[0] in kept, f".dockerignore keeps {source} out of the build"
            for name in tracked(source):
                path = tmp_path / target.lstrip("/") / (name.removeprefix(f"{source}/") if target[-1] != "/" else name)
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(TOP / name, path)
    built = build(tmp_path / "wheels", tmp_path / "src")["phasegate"]
    assert zipfile.ZipFile(built).namelist() == zipfile.ZipFile(wheels["phasegate"]).namelist()


@pytest.fixture(scope="module")
def controller(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The toolkit alone: no torch, no matplotlib."""
    made = Environment(tmp_path_factory.mktemp("controller") / "venv")
    made.pip("install", "-c", TOP / "constraints.txt", wheels["phasegate"])
    return made


@pytest.fixture(scope="module")
def bench(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """phasegate[bench] and the kernel's wheel. What they depend on is what runs this test (no second torch is fetched): pip takes
    nothing from an index, so a requirement that the test's environment does not have by the wheels' own word fails here."""
    made = Environment(tmp_path_factory.mktemp("bench") / "venv")
    for name in needed("phasegate", {"bench"}) | needed("verify_attn", set()):
        for top in {Path(file).parts[0] for file in metadata.files(name) or ()} - {"..", "__pycache__"}:
            place = Path(str(metadata.distribution(name).locate_file(top)))
            if place.exists() and not (made.packages / top).exists():
                (made.packages / top).symlink_to(place)
    made.pip("install", "--no-index", f"{wheels['phasegate']}[bench]", wheels["verify_attn"])
    return made


def needed(name: str, extras: set[str]) -> set[str]:
    """Names of the installed distributions that one needs, itself left out, as those installed declare it."""
    seen: set[tuple[str, str]] = set()
    waiting = [(name, extra) for extra in ("", *extras)]
    while waiting:
        owner, extra = waiting.pop()
        if (owner, extra) in seen:
            continue
        seen.add((owner, extra))
        for text in metadata.requires(owner) or ():
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                waiting += [(wanted.name.lower(), more) for more in ("", *wanted.extras)]
    return {owner for owner, _ in seen} - {"phasegate", "verify_attn"}


def tracked(below: str = ".") -> list[str]:
    """What git knows, and what it would (a new file that is not ignored), as it lies here."""
    argv = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", below]
    names = subprocess.run(argv, cwd=TOP, capture_output=True, text=True, check=True).stdout.split("\0")
    return [name for name in names if name and (TOP / name).is_file()]


def test_the_wheels_hold_every_file_of_the_packages(wheels: dict[str, Path]) -> None:
    """Templates, prompts, styles and kernel sources are found beside the code: one that package-data forgets is missed only far away."""
    places = {
        "phases": ("phasegate", "phases"),
        f"{KERNEL}/verify_attn": ("verify_attn", "verify_attn"),
        f"{KERNEL}/csrc": ("verify_attn", "verify_attn/csrc"),
    }
    for folder, (wheel, place) in places.items():
        inside = set(zipfile.ZipFile(wheels[wheel]).namelist())
        files = [name for name in tracked(folder) if not name.endswith(".md")]
        assert files and not [name for name in files if place + name.removeprefix(folder) not in inside]


@pytest.fixture(scope="module")
def benched(bench: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From `phase init` through Phase 1, in a directory of its own; it waits for review."""
    work = tmp_path_factory.mktemp("a path with spaces") / "fast norm"
    bench.phase(work.parent, "init", work.name, "--name", "fast_norm")
    for argv in (["add", "."], ["commit", "-qm", "start"]):
        bench.run(["git", *argv], work)
    told = bench.phase(work, "run", code=3)
    assert "build-parity: PASS" in told and str(TOP) not in told
    return work


def test_from_init_to_the_review(bench: Environment, benched: Path) -> None:
    assert bench.phase(benched, "gate", "review").startswith("PASS  0001-build-parity-PASS  waiting for review")
    assert '<svg class="chart"' in bench.phase(benched, "checkpoint", "show", "1", "--file", "report.html")
    code = "import phases, verify_attn.csrc; print(phases.__file__, *verify_attn.csrc.__path__)"
    assert bench.run([bench.python, "-c", code], benched).count(str(bench.packages)) == 2


@pytest.mark.parametrize("system", ["Linux", "not Linux"])
def test_whoever_is_on_call_needs_no_torch(system: str, controller: Environment, benched: Path, tmp_path: Path) -> None:
    """The repository as a laptop gets it: everything is shown and decided, nothing is measured. As docs/install.md says, macOS too
    (rollback and watch on a fleet: test_laptop.py)."""
    work = tmp_path / "mine"
    shutil.copytree(benched, work)
    command = [controller.root / "bin" / "phase"] if system == "Linux" else [controller.python, LAPTOP]

    def phase(*arguments: object, code: int = 0) -> str:
        return controller.run([*command, *arguments], work, code)

    assert "waiting for review" in phase("status")
    assert "lower bound" in phase("gate", "review")
    digest = json.loads(phase("checkpoint", "list", "--json"))["checkpoints"][0]["digest"]
    phase("gate", "approve", "1", "--digest", digest[:16], "--reason", "fast and right")
    assert "approved" in phase("status")
    phase("checkpoint", "verify")
    assert "prove parity" in phase("plan")
    phase("report", "--to", "page.html")
    page = (work / "page.html").read_text()
    assert "pip install &#x27;phasegate[plots]&#x27;" in page and "<table" in page

    # What needs an extra says so, with the words that install it, before anything else is asked of the machine.
    refused = phase("run", "build-parity", code=1)
    assert "Phase 1 needs torch" in refused and "pip install 'phasegate[bench]'" in refused
    lacks = {row["name"]: row for row in json.loads(phase("doctor", "--json", code=1))["findings"]}
    assert lacks["torch"]["health"] == "problem" and "phasegate[bench]" in lacks["torch"]["cure"]
    assert lacks["matplotlib"]["health"] == "warning" and "phasegate[plots]" in lacks["matplotlib"]["cure"]


def test_the_toolkit_that_operates_is_small_and_all_of_it_imports(controller: Environment, tmp_path: Path) -> None:
    size = sum(path.lstat().st_size for path in controller.root.rglob("*") if not path.is_symlink()) / (1 << 20)
    assert size <= MOST_MIB, f"{size:.0f} MiB"
    present = {path.name.partition("-")[0].lower() for path in controller.packages.glob("*.dist-info")}
    assert present.isdisjoint({"torch", "matplotlib", "triton"})
    code = """
import importlib, pkgutil, phases
for module in pkgutil.walk_packages(phases.__path__, "phases."):
    try: importlib.import_module(module.name)
    except ImportError as fault: print(module.name, fault.name)
"""
    lacking = [line.split() for line in controller.run([controller.python, "-c", code], tmp_path).splitlines()]
    assert lacking and all(
        name == "torch" and module.startswith(("phases.harness.", "phases.engines.embedded.sgl_kernel"))
        for module, name in lacking
    ), lacking
