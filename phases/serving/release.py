"""Make a release of a kernel for a serving environment: its wheel unpacked, its compiled objects, a manifest."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from phases.base.errors import BuildError
from phases.base.results import BuildRecord
from phases.engines.ssh.bundle import Bundle, Launch, bundle_release, make_bundle
from phases.harness import build as kernel_build
from phases.harness.contract import Kernel

SITE, OBJECTS = "site", "objects"
IGNORED = shutil.ignore_patterns("build", "dist", "*.egg-info", "__pycache__", ".git", ".venv")


def make_release(
    kernel: Kernel, archs: Sequence[str], cache: Path, progress: Callable[[str], None], packages: Sequence[Path] = ()
) -> tuple[Bundle, tuple[BuildRecord, ...]]:
    """Build the objects for `archs` (from the cache where they are in it) and the wheel; both as one bundle.

    Args:
        packages: directories of further distributions whose wheels go into the same release.
    Raises:
        BuildError: a wheel or an object cannot be built.
    """
    records = kernel_build.build(kernel, archs, cache, progress)
    failed = [record for record in records if not record.ok]
    if failed:
        raise BuildError(f"{kernel.name} {failed[0].variant} for {failed[0].arch} does not build: {failed[0].reason}")
    with tempfile.TemporaryDirectory(prefix="phasegate-wheel-") as folder:
        wheels = [_wheel(root, Path(folder) / str(number)) for number, root in enumerate([kernel.root, *packages])]
        launch = Launch(argv=(), env=object_variables(kernel, "{release}/" + OBJECTS), site=SITE)
        facts = {
            "kernel": kernel.name,
            "backend": kernel.backend,
            "objects": [_described(record) for record in records],
        }
        unpacked = {file.path: file.source for file in bundle_release(wheels, (), launch).files}
        return make_bundle({**unpacked, **_object_files(records, cache)}, launch, facts), records


def object_variables(kernel: Kernel, directory: str) -> dict[str, str]:
    """Environment variables by which a kernel finds prebuilt objects: <PACKAGE>_PREBUILT and <PACKAGE>_OBJECTS."""
    return {variable(kernel, "PREBUILT"): directory, variable(kernel, "OBJECTS"): directory}


def variable(kernel: Kernel, name: str) -> str:
    """Name of one of the environment variables a kernel's plugin reads: <PACKAGE>_<NAME>."""
    return f"{kernel.package.upper().replace('.', '_')}_{name}"


def _wheel(root: Path, folder: Path) -> Path:
    """The wheel of a distribution, built from a copy: building in place would take along what earlier builds left."""
    if not (root / "pyproject.toml").is_file():
        raise BuildError(
            f"{root} is no Python distribution: it has no pyproject.toml.", hint="Give the directory that holds it."
        )
    source = folder / "source"
    shutil.copytree(root, source, ignore=IGNORED)
    argv = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"]
    done = subprocess.run(
        [*argv, "--no-build-isolation", "-w", str(folder), str(source)], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        raise BuildError(f"the wheel of {root} does not build:\n{tail}\n", hint="Mend its pyproject.toml.")
    return wheels[0]


def _object_files(records: Sequence[BuildRecord], cache: Path) -> dict[str, Path]:
    """Files of every built object by their path in the release: its directory in the cache, as its loader expects it."""
    files: dict[str, Path] = {}
    for record in records:
        if not record.artifact:
            continue
        artifact = cache / record.artifact
        members = (
            [artifact]
            if artifact.parent == cache
            else sorted(path for path in artifact.parent.iterdir() if path.is_file())
        )
        files |= {f"{OBJECTS}/{path.relative_to(cache).as_posix()}": path for path in members}
    return files


def _described(record: BuildRecord) -> dict[str, str]:
    return {
        "variant": record.variant,
        "arch": record.arch,
        "sha256": record.sha256,
        "cache_key": record.cache_key,
        "compiler": record.compiler,
    }
