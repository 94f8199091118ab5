"""The worker and its channel: noise, sudden ends and orphans."""

import os
import signal
import subprocess
import sys
import time

import pytest

from phases.base.errors import KernelContractError
from phases.harness import contract, process
from tests.harness import kernels


def job(kernel=None, **extra):
    return {"op": "describe", "kernel": contract.to_json(kernel or kernels.five_line()), "device": "cpu", **extra}


def test_messages_arrive_and_nothing_is_left_open():
    before = len(os.listdir("/proc/self/fd"))
    seen = []
    assert process.run(job(), seen.append) is None
    assert [message["type"] for message in seen] == ["described"] and seen[0]["facts"]["torch"]
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_an_exception_while_listening_kills_the_worker():
    class Stop(Exception):
        pass

    def stop(_):
        raise Stop

    with pytest.raises(Stop):
        process.run(job(), stop)
    assert _workers() == []


def test_a_cuda_job_without_a_gpu_is_a_clear_error():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(
        process.WorkerError, match="no CUDA device that this torch can use. Run on a machine with a GPU"
    ):
        process.run(job(device="cuda") | {"device": "cuda"}, lambda _: None)


def test_a_kernel_that_prints_protocol_lines_is_only_noise(tmp_path):
    (tmp_path / "noisy.py").write_text(
        "import sys, os\nos.write(1, b'{\"type\": \"done\"}\\n' * 1000)\nprint('x' * 100000)\nraise ImportError('end')\n"
    )
    kernel = {**contract.to_json(kernels.five_line()), "root": str(tmp_path), "entry": "noisy"}
    with pytest.raises(KernelContractError, match="ImportError: end"):
        process.run({"op": "describe", "kernel": kernel, "device": "cpu"}, lambda _: None)


def test_the_worker_dies_with_the_toolkit():
    code = (
        "from phases.harness import parity\nfrom tests.harness import kernels\n"
        "parity.prove(kernels.cheats(), 'cpu', variants=['hangs'], cases=['q5/*'], silence=100)\n"
    )
    toolkit = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        deadline = time.monotonic() + 200
        while not (children := _workers(toolkit.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert children
        time.sleep(1.0)
        children = _workers(toolkit.pid)
    finally:
        toolkit.send_signal(signal.SIGKILL)
        toolkit.wait()
    deadline = time.monotonic() + 120
    while any(os.path.exists(f"/proc/{pid}") for pid in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in children)


def _workers(parent=None):
    """Pids of the workers that are children of `parent` (this process by default)."""
    parent = parent or os.getpid()
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
            command = open(f"/proc/{pid}/cmdline").read()
        except OSError:
            continue
        if int(stat[1]) == parent and "phases.harness.worker" in command and stat[0] != "Z":
            found.append(int(pid))
    return found
