"""The embedded serving environment: real SGLang on the CPU, provisioned once into a cache directory.

`ensure` returns the environment, making it first where it is missing. The directory's name is a digest of everything that
decides its content (pinned requirements, the CPU functions of `sgl_kernel`, the model generator, the Python), so a change
of any of them makes a new one and nothing is ever updated in place. `complete.json`, written last, lists every file with
size and sha256; a directory without it is what a killed provisioning left and is made anew. The lock is the kernel's
(flock), so it dies with its process.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from phases.base.errors import ServingError

TORCH = "torch==2.13.0"
HERE = Path(__file__).parent
INPUTS = ("requirements.txt", "make_model.py", "sgl_kernel")
RECIPE = "4"  # of the code below: change it when the same inputs would give another environment
NEEDED_BYTES = 4 << 30
MARKER = "complete.json"


@dataclass(frozen=True)
class ServingEnvironment:
    """A provisioned environment.

    Attributes:
        root: its directory.
        seconds, bytes: what it took to make it, and its size.
        digest: sha256 over all its files.
        fresh: whether this call made it.
    """

    root: Path
    seconds: float
    bytes: int
    digest: str
    fresh: bool = False

    @property
    def python(self) -> Path:
        return self.root / "venv" / "bin" / "python"

    @property
    def unused_models(self) -> list[str]:
        """Names of SGLang's model files that the embedded models do not need; not importing them saves every process a sixth
        of its start."""
        found = self.root.glob("venv/lib/python*/site-packages/sglang/srt/models/*.py")
        return sorted(path.stem for path in found if path.stem not in ("__init__", "registry", "deepseek_v2"))

    @property
    def target_model(self) -> Path:
        return self.root / "models" / "target"

    @property
    def draft_model(self) -> Path:
        return self.root / "models" / "draft"


def cache_directory() -> Path:
    """$XDG_CACHE_HOME/phasegate, or ~/.cache/phasegate."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "phasegate"


def environment_key() -> str:
    """Digest of everything that decides the environment's content."""
    digest = hashlib.sha256(f"{RECIPE}\0{TORCH}\0{sys.implementation.cache_tag}".encode())
    for name in INPUTS:
        path = HERE / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.relative_to(HERE).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def ensure(cache: Path | None = None, progress: Callable[[str], None] = print) -> ServingEnvironment:
    """The environment, made now if it is not there, checked by content if it is.

    Raises:
        ServingError: too little disk, a failed install (with its last lines), or files that were altered.
    """
    cache = cache or cache_directory()
    root = cache / f"serving-{environment_key()}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise ServingError(f"cannot create {cache}: {fault.strerror}.", hint="Set XDG_CACHE_HOME.") from None
    with _locked(root.with_suffix(".lock"), progress):
        if not (root / MARKER).exists():
            _provision(root, progress)
            return _opened(root, fresh=True)
        environment = _opened(root)
        altered = check(environment)
        if altered:
            raise ServingError(
                f"the serving environment {root} was altered: {', '.join(altered[:5])}"
                f"{' …' if len(altered) > 5 else ''}.",
                hint=f"Remove {root}; the next run makes it again.",
            )
    return environment


def find(cache: Path | None = None) -> ServingEnvironment | None:
    """The environment if it is there already, unchecked; None otherwise. Makes nothing."""
    root = (cache or cache_directory()) / f"serving-{environment_key()}"
    return _opened(root) if (root / MARKER).exists() else None


def check(environment: ServingEnvironment) -> list[str]:
    """Files whose content is not what provisioning left, relative to the root; compiled Python is not looked at."""
    recorded = json.loads((environment.root / MARKER).read_text())["files"]
    found = _hash_tree(environment.root)
    return sorted(name for name in recorded.keys() | found.keys() if recorded.get(name) != found.get(name))


def _opened(root: Path, fresh: bool = False) -> ServingEnvironment:
    marker = json.loads((root / MARKER).read_text())
    return ServingEnvironment(root, marker["seconds"], marker["bytes"], marker["digest"], fresh)


def _provision(root: Path, progress: Callable[[str], None]) -> None:
    free = shutil.disk_usage(root.parent).free
    if free < NEEDED_BYTES:
        raise ServingError(
            f"the serving environment needs {NEEDED_BYTES >> 30} GB under {root.parent}, {free >> 20} MB are free.",
            hint="Free some disk or set XDG_CACHE_HOME to a larger one.",
        )
    progress(f"provisioning SGLang for the CPU into {root}: once, about 2.4 GB of disk and one to three minutes")
    started = time.monotonic()
    if root.exists():
        shutil.rmtree(root)
    root.mkdir()
    python = root / "venv" / "bin" / "python"
    _run([sys.executable, "-m", "venv", str(root / "venv")], "create a virtual environment")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    progress("installing the pinned requirements")
    _run([*pip, "--no-deps", "--require-hashes", "-r", str(HERE / "requirements.txt")], "install the requirements")
    progress(f"installing {TORCH}")
    _run([*pip, TORCH], f"install {TORCH}")
    site = Path(_run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], "ask for its site"))
    shutil.copytree(HERE / "sgl_kernel", site / "sgl_kernel", ignore=shutil.ignore_patterns("__pycache__"))
    _guard_torchvision(site)
    progress("generating the model and its tokenizer")
    _run([str(python), str(HERE / "make_model.py"), str(root / "models")], "generate the model")
    files = _hash_tree(root)
    size = sum(file["size"] for file in files.values())
    summary = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    seconds = round(time.monotonic() - started, 1)
    marker = {"digest": summary, "seconds": seconds, "bytes": size, "files": files}
    partial = root / (MARKER + ".partial")
    partial.write_text(json.dumps(marker))
    os.replace(partial, root / MARKER)
    progress(f"serving environment ready: {seconds:.0f} s, {size / 1e9:.1f} GB")


def _guard_torchvision(site: Path) -> None:
    """Let torchvision import without its compiled operators.

    The published build's operators want CUDA and cannot load beside a CPU build of torch; two of its decorators then refer
    to operators that do not exist. SGLang never calls them on text models.
    """
    path = site / "torchvision" / "_meta_registrations.py"
    text = path.read_text()
    decorator = '@torch.library.register_fake("torchvision::'
    if decorator not in text:
        return
    guarded = '@(torch.library.register_fake if torchvision.extension._has_ops() else _absent)("torchvision::'
    absent = "def _absent(name):\n    return lambda function: function\n\n\n"
    path.write_text(_before_first_definition(text.replace(decorator, guarded), absent))


def _before_first_definition(text: str, addition: str) -> str:
    """The module's text with a definition added after its imports."""
    lines = text.splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if line.startswith(("import ", "from ")))
    return "".join(lines[: last + 1]) + "\n\n" + addition + "".join(lines[last + 1 :])


def _run(argv: list[str], what: str) -> str:
    """Run one command of the provisioning; its stdout, or ServingError with its last lines."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONNOUSERSITE": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        raise ServingError(
            f"could not {what} (exit {done.returncode}):\n{tail}\n", hint="Then run the same command again."
        )
    return done.stdout.strip()


def _hash_tree(root: Path) -> dict[str, dict[str, object]]:
    """size and sha256 of every regular file below root; links by their target."""
    names = [
        path
        for path in sorted(root.rglob("*"))
        if (path.is_symlink() or path.is_file())
        and "__pycache__" not in path.parts
        and not path.name.startswith(MARKER)
    ]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip((path.relative_to(root).as_posix() for path in names), pool.map(_hash_file, names)))


def _hash_file(path: Path) -> dict[str, object]:
    if path.is_symlink():
        return {"size": 0, "link": os.readlink(path)}
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


@contextmanager
def _locked(path: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold the provisioning lock; says so when another process has it."""
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            progress(f"waiting for process {file.read().strip() or '?'}, which is provisioning the serving environment")
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
