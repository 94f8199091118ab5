"""The build cache: keyed by content, safe against kills, damage and each other; errors that say what to do."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from verify_attn import KernelBuildError, build, sources, toolchain
from verify_attn.sources import Library

ARCHS = ("x86-64-v3",)
TINY = Library("tiny", "cxx", ("tiny/tiny.cpp",), ("tiny/tiny.h",), ("tiny",), ARCHS)
SLOW_COMPILER = """#!/bin/sh
case "$1" in --version|-dumpmachine) exec {real} "$@";; esac
echo started >> {log}
while [ -e {hold} ]; do sleep 0.05; done
exec {real} "$@"
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A library of one line, and its own source directory and cache."""
    root = tmp_path / "csrc"
    (root / "tiny").mkdir(parents=True)
    (root / "verify_attn.h").write_text("")
    (root / "tiny" / "tiny.h").write_text("#define ANSWER 41\n")
    (root / "tiny" / "tiny.cpp").write_text('#include "tiny.h"\nextern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }\n')
    for module in (sources, build):
        monkeypatch.setattr(module, "LIBRARIES", (TINY,))
    monkeypatch.setattr(build, "csrc", lambda: root)
    monkeypatch.setattr(build, "library", lambda name: {"tiny": TINY}[name])
    return root


def _answer(built: build.Built) -> int:
    code = f"import ctypes; print(ctypes.CDLL({built.path!r}).answer())"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def test_second_build_comes_from_the_cache_and_mtimes_play_no_part(tiny, tmp_path):
    cache = tmp_path / "cache"
    first = build.build("tiny", ARCHS, cache)
    assert not first.cached and _answer(first) == 41
    for stamp in (0, time.time() + 1e6):
        os.utime(tiny / "tiny" / "tiny.cpp", (stamp, stamp))
        again = build.build("tiny", ARCHS, cache)
        assert again.cached and again.path == first.path and again.sha256 == first.sha256


def test_changed_content_is_built_anew_even_with_an_old_mtime(tiny, tmp_path):
    cache = tmp_path / "cache"
    first = build.build("tiny", ARCHS, cache)
    header = tiny / "tiny" / "tiny.h"
    stamp = header.stat().st_mtime
    header.write_text("#define ANSWER 43\n")
    os.utime(header, (stamp - 1e6, stamp - 1e6))
    second = build.build("tiny", ARCHS, cache)
    assert not second.cached and second.cache_key != first.cache_key and _answer(second) == 43 and _answer(first) == 41
    header.write_text("#define ANSWER 41\n")
    assert build.build("tiny", ARCHS, cache).path == first.path


def test_flags_compiler_and_place_in_the_key(tiny, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first = build.build("tiny", ARCHS, cache)
    with monkeypatch.context() as other:
        other.setattr(build, "CXX_FLAGS", (*build.CXX_FLAGS, "-DOTHER"))
        assert build.build("tiny", ARCHS, cache).cache_key != first.cache_key
    with monkeypatch.context() as other:
        described = toolchain.cxx()
        other.setattr(toolchain, "cxx", lambda: toolchain.Compiler("cxx", described.path, "other", "other"))
        assert build.build("tiny", ARCHS, cache).cache_key != first.cache_key
    moved = tmp_path / "elsewhere"
    shutil.copytree(tiny, moved)
    monkeypatch.setattr(build, "csrc", lambda: moved)
    assert build.build("tiny", ARCHS, cache).cached


def test_damaged_objects_are_made_again(tiny, tmp_path):
    cache = tmp_path / "cache"
    first = Path(build.build("tiny", ARCHS, cache).path)
    whole = first.read_bytes()
    damages = [lambda: first.write_bytes(whole[:-7]), lambda: first.write_bytes(b""), first.unlink,
               lambda: (first.parent / "record.json").write_text("{"), (first.parent / "record.json").unlink]
    for damage in damages:
        damage()
        again = build.build("tiny", ARCHS, cache)
        assert not again.cached and _answer(again) == 41
        assert build.build("tiny", ARCHS, cache).cached


def _slow_compiler(tmp_path: Path) -> tuple[Path, Path, Path]:
    compiler, hold, log = tmp_path / "slow-g++", tmp_path / "hold", tmp_path / "log"
    compiler.write_text(SLOW_COMPILER.format(real=shutil.which("g++"), log=log, hold=hold))
    compiler.chmod(0o755)
    hold.touch()
    log.touch()
    return compiler, hold, log


BUILDER = """
import sys
from pathlib import Path
from verify_attn import build
print(build.build("cpu", ("x86-64-v3",), Path(sys.argv[1])).path)
"""


def _start(cache: Path, compiler: Path) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", BUILDER, str(cache)], env={**os.environ, "CXX": str(compiler)},
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def _wait_for(condition, what: str) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_build_leaves_nothing_that_blocks_or_looks_finished(tmp_path):
    compiler, hold, log = _slow_compiler(tmp_path)
    cache = tmp_path / "cache"
    first = _start(cache, compiler)
    _wait_for(lambda: log.read_text(), "the compiler was never started")
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    assert any(p.is_dir() and p.name.startswith(".cpu-") for p in cache.iterdir()), "killed before it had begun"
    hold.unlink()
    second = _start(cache, compiler)
    out, err = second.communicate(timeout=400)
    assert second.returncode == 0, err
    assert Path(out.strip()).is_file()
    assert not [p for p in cache.iterdir() if p.is_dir() and p.name.startswith(".")], "the killed build's leftovers are still there"


@pytest.mark.slow
def test_two_processes_compile_once(tmp_path):
    compiler, hold, log = _slow_compiler(tmp_path)
    cache = tmp_path / "cache"
    both = [_start(cache, compiler) for _ in range(2)]
    _wait_for(lambda: log.read_text(), "the compiler was never started")
    hold.unlink()
    answers = [p.communicate(timeout=400) for p in both]
    assert [p.returncode for p in both] == [0, 0], answers
    assert answers[0][0] == answers[1][0]
    assert len(log.read_text().splitlines()) == 5, "kernel for v3 and portable, entry, pool, link: once each"


def test_prebuilt_objects_need_no_compiler(tiny, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    made = build.build("tiny", ARCHS, cache)
    bundle = tmp_path / "bundle"
    shutil.copytree(cache, bundle)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = build.prebuilt("tiny", "x86-64-v3", bundle)
    assert found and found.sha256 == made.sha256 and Path(found.path).is_relative_to(bundle)
    assert build.prebuilt("tiny", "sm_90", bundle) is None
    (tiny / "tiny" / "tiny.h").write_text("#define ANSWER 44\n")
    assert build.prebuilt("tiny", "x86-64-v3", bundle) is None, "made from other sources"


def test_compile_errors_carry_the_compilers_words(tiny, tmp_path):
    (tiny / "tiny" / "tiny.h").write_text("#error this does not compile\n")
    with pytest.raises(KernelBuildError, match=r"tiny for x86-64-v3: g\+\+ failed \(1\); its last lines:\n(.|\n)*this does not compile"):
        build.build("tiny", ARCHS, tmp_path / "cache")
    assert not [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]


def test_missing_compilers(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(KernelBuildError, match="no C[+][+] compiler found .*apt-get install g[+][+]"):
        build.build("tiny", ARCHS, tmp_path / "cache")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelBuildError, match="CXX is set to 'no-such-compiler'"):
        toolchain.cxx()
    monkeypatch.setenv("NVCC", "/nowhere/nvcc")
    with pytest.raises(KernelBuildError, match="NVCC is '/nowhere/nvcc', which is not executable"):
        toolchain.nvcc()


def _fake_nvcc(tmp_path: Path, version: str, archs: str) -> str:
    fake = tmp_path / "nvcc"
    fake.write_text(f'#!/bin/sh\ncase "$1" in --version) echo "{version}";; --list-gpu-arch) printf "{archs}";; *) exit 3;; esac\n')
    fake.chmod(0o755)
    return str(fake)


def test_wrong_or_old_nvcc(tmp_path, monkeypatch):
    monkeypatch.setenv("NVCC", _fake_nvcc(tmp_path, "I am a teapot", ""))
    with pytest.raises(KernelBuildError, match="does not read like nvcc .'I am a teapot'.; set NVCC"):
        toolchain.nvcc()
    old = _fake_nvcc(tmp_path, "Cuda compilation tools, release 11.8, V11.8.89", "compute_80\\ncompute_90\\n")
    monkeypatch.setenv("NVCC", old)
    compiler = toolchain.nvcc()
    toolchain.check_archs(compiler, ["sm_80", "sm_90", "sm_90a"])
    with pytest.raises(KernelBuildError, match="release 11.8.* cannot build for sm_120, sm_103a; it knows sm_80, sm_90[.] Use a toolkit"):
        toolchain.check_archs(compiler, ["sm_90", "sm_120", "sm_103a"])
    with pytest.raises(KernelBuildError, match="'hopper' is not a GPU architecture"):
        toolchain.check_archs(compiler, ["hopper"])


def test_empty_and_unknown_requests(tiny, tmp_path):
    with pytest.raises(KernelBuildError, match="no architecture given for tiny; it can be built for x86-64-v3"):
        build.build("tiny", (), tmp_path)
    with pytest.raises(KernelBuildError, match="there is no library 'tinny'; there are tiny"):
        build.build("tinny", ARCHS, tmp_path)


def test_unwritable_cache_and_full_disk(tiny, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(KernelBuildError, match="cannot write the build cache .*; free space or set VERIFY_ATTN_CACHE"):
        build.build("tiny", ARCHS, blocked)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(build, "_write_synced", full)
        with pytest.raises(KernelBuildError, match="the disk is full; free space"):
            build.build("tiny", ARCHS, tmp_path / "cache")
    assert _answer(build.build("tiny", ARCHS, tmp_path / "cache")) == 41


def test_the_cache_directory_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("VERIFY_ATTN_CACHE", str(tmp_path / "own"))
    assert build.cache_dir() == tmp_path / "own"
    monkeypatch.delenv("VERIFY_ATTN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_dir() == tmp_path / "verify_attn"


def test_records_say_what_was_done(tiny, tmp_path):
    built = build.build("tiny", ARCHS, tmp_path)
    record = json.loads((Path(built.path).parent / "record.json").read_text())
    assert record["compiler"] == toolchain.cxx().version and "-ffp-contract=fast" in record["flags"]


def test_sources_that_change_while_compiling_are_noticed(tiny, tmp_path, monkeypatch):
    header, compile_one = tiny / "tiny" / "tiny.h", build._run

    def edit_meanwhile(command: list[str], what: str) -> None:
        compile_one(command, what)
        header.write_text("#define ANSWER 42\n")

    with monkeypatch.context() as patched:
        patched.setattr(build, "_run", edit_meanwhile)
        with pytest.raises(KernelBuildError, match="the sources of tiny changed while they were compiled; build again"):
            build.build("tiny", ARCHS, tmp_path / "cache")
    assert _answer(build.build("tiny", ARCHS, tmp_path / "cache")) == 42
