"""Provisioning: made once, checked by content, unharmed by kills. The installs themselves are replaced by small files."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phases.base.errors import ServingError
from phases.engines.embedded import provision


@pytest.fixture
def quick(monkeypatch):
    """Replace every command by what it leaves; returns the list of commands."""
    ran: list[str] = []

    def run(argv: list[str], what: str) -> str:
        ran.append(what)
        if what == "create a virtual environment":
            site = Path(argv[-1]) / "lib" / "site-packages"
            site.mkdir(parents=True)
            (site / "module.py").write_text("value = 1\n")
            run.site = site
        if what == "generate the model":
            (Path(argv[-1]) / "target").mkdir(parents=True)
            (Path(argv[-1]) / "target" / "model.safetensors").write_bytes(b"weights")
        return str(run.site)

    monkeypatch.setattr(provision, "_run", run)
    monkeypatch.setattr(provision, "_guard_torchvision", lambda site: None)
    return ran


def test_made_once_and_then_only_checked(tmp_path, quick):
    said: list[str] = []
    made = provision.ensure(tmp_path, said.append)
    assert made.fresh and made.bytes > 0
    assert any("GB of disk" in line and "minutes" in line for line in said)  # what it will cost
    assert any(re.search(r"ready: \d+ s, [\d.]+ GB", line) for line in said)  # what it cost
    commands = len(quick)
    again = provision.ensure(tmp_path, said.append)
    assert not again.fresh and again.digest == made.digest and len(quick) == commands
    assert provision.find(tmp_path) == again


def test_nothing_is_made_by_looking(tmp_path):
    assert provision.find(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", ["altered", "missing", "added"])
def test_altered_files_are_named(tmp_path, quick, change):
    made = provision.ensure(tmp_path, lambda line: None)
    file = made.root / "venv" / "lib" / "site-packages" / "module.py"
    {
        "altered": lambda: file.write_text("value = 2\n"),  # the same size
        "missing": file.unlink,
        "added": lambda: file.with_name("stray.py").write_text(""),
    }[change]()
    with pytest.raises(ServingError, match="altered.*(module|stray).py.*makes it again"):
        provision.ensure(tmp_path, lambda line: None)


def test_compiled_python_does_not_count(tmp_path, quick):
    made = provision.ensure(tmp_path, lambda line: None)
    cache = made.root / "venv" / "lib" / "site-packages" / "__pycache__"
    cache.mkdir()
    (cache / "module.cpython-311.pyc").write_bytes(b"x")
    assert provision.check(made) == []


def test_what_a_killed_provisioning_left_is_made_anew(tmp_path, quick):
    root = tmp_path / f"serving-{provision.environment_key()}"
    (root / "venv").mkdir(parents=True)
    (root / "venv" / "half").write_text("half")
    made = provision.ensure(tmp_path, lambda line: None)
    assert made.fresh and not (root / "venv" / "half").exists()


def test_lock_of_a_killed_process_does_not_block(tmp_path, quick):
    code = """
import sys, time
from pathlib import Path
from phases.engines.embedded import provision
with provision._locked(Path(sys.argv[1]), print):
    print("held", flush=True); time.sleep(600)
"""
    lock = (tmp_path / f"serving-{provision.environment_key()}").with_suffix(".lock")
    holder = subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline().strip() == "held"
    with lock.open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert lock.read_text() == str(holder.pid)  # a waiting process can say who holds it
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    assert provision.ensure(tmp_path, lambda line: None).fresh


def test_failed_install_shows_its_last_lines_and_leaves_no_marker(tmp_path, monkeypatch):
    monkeypatch.setattr(provision, "TORCH", "no-such-distribution==0")
    real = provision._run

    def run(argv: list[str], what: str) -> str:
        if what == "create a virtual environment":
            (Path(argv[-1]) / "bin").mkdir(parents=True)
            return ""
        return real([sys.executable, "-c", "import sys; sys.exit('no matching distribution')"], what)

    monkeypatch.setattr(provision, "_run", run)
    with pytest.raises(ServingError, match="could not install the requirements.*\n.*no matching distribution"):
        provision.ensure(tmp_path, lambda line: None)
    assert provision.find(tmp_path) is None


def test_too_little_disk_stops_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(provision, "NEEDED_BYTES", 1 << 60)
    with pytest.raises(ServingError, match="free"):
        provision.ensure(tmp_path, lambda line: None)
    assert not list(tmp_path.glob("serving-*/venv"))


def test_key_follows_content_not_time(tmp_path, monkeypatch):
    before = provision.environment_key()
    for path in (provision.HERE / "make_model.py",):
        status = path.stat()
        os.utime(path, (time.time(), time.time()))
        assert provision.environment_key() == before
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    monkeypatch.setattr(provision, "TORCH", "torch==0")
    assert provision.environment_key() != before


def test_every_requirement_is_pinned_and_hashed():
    text = (provision.HERE / "requirements.txt").read_text()
    entries = re.split(r"\n(?=\S)", "\n".join(line for line in text.splitlines() if not line.startswith("#")).strip())
    assert len(entries) > 90
    for entry in entries:
        assert re.fullmatch(r"[a-z0-9._-]+==\S+ \\\n(    --hash=sha256:[0-9a-f]{64}( \\\n)?)+", entry), entry


def test_torchvision_guard_gives_valid_python(tmp_path):
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "_meta_registrations.py").write_text(
        "import torch\nimport torchvision.extension\n\n\ndef other():\n    pass\n\n\n"
        '@torch.library.register_fake("torchvision::roi_align")\ndef meta():\n    pass\n'
    )
    provision._guard_torchvision(tmp_path)
    text = (package / "_meta_registrations.py").read_text()
    compile(text, "guarded", "exec")
    assert "_has_ops() else _absent)" in text
    assert json.dumps(text).count("torchvision::roi_align") == 1
