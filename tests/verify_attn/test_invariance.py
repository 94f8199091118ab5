"""Batch-invariant mode, threads, forks: what may not show in the bits, and what may not hang."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
from verify_attn import cases, inputs

from tests.verify_attn.helpers import TOLERANCE, error, problem, run


def _poisoned(case: dict) -> dict:
    return {name: tensor.fill_(float("nan")) for name, tensor in inputs.outputs(case, "cpu").items()}


@pytest.mark.parametrize("chunk", [64, 256, 1000])
@pytest.mark.parametrize("order", [[2], [0], [2, 1, 0, 3], [3, 3, 2, 0, 0, 1]])
def test_a_row_has_the_same_bits_whoever_shares_its_batch(chunk, order):
    case = cases.make([9, 5, 17, 1], [900, 0, 2100, 40], heads=8, dtype="float32", chunk=chunk)
    made = inputs.inputs(case, 3, "cpu")
    whole = inputs.problem(made, _poisoned(case))
    out, lse = run(whole, threads=3)
    other_case, other = inputs.rearranged(case, made, order)
    part = inputs.problem(other, _poisoned(other_case))
    out2, lse2 = run(part, threads=2)
    for n, b in enumerate(order):
        mine = slice(int(whole.qo_indptr[b]), int(whole.qo_indptr[b + 1]))
        theirs = slice(int(part.qo_indptr[n]), int(part.qo_indptr[n + 1]))
        assert torch.equal(out[mine], out2[theirs]) and torch.equal(lse[mine], lse2[theirs])


def test_batch_invariant_bits_do_not_depend_on_the_number_of_threads():
    p = problem(9, 6000, heads=2, chunk=256)
    reference = run(p, threads=1)
    for threads in (2, 3, 5, 16):
        again = run(p, threads=threads)
        assert torch.equal(reference[0], again[0]) and torch.equal(reference[1], again[1]), threads
    assert error(p) <= TOLERANCE[torch.float32]


def test_without_the_mode_the_bits_do_depend_on_the_batch():
    """The mode is needed: were this to fail, the tests above would prove nothing."""
    p = problem(9, 6000, heads=2)
    assert not torch.equal(run(p, threads=1)[0], run(p, threads=3)[0])


def test_calls_from_several_threads_at_once_are_right():
    p = problem(9, 2000, heads=16)
    expected = run(p, threads=2)
    wrong = []

    def work(seed: int) -> None:
        mine = problem(9, 2000, heads=16, seed=1)
        for _ in range(5):
            if not torch.equal(run(mine, threads=2)[0], expected[0]):
                wrong.append(seed)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_a_forked_child_can_use_the_kernel():
    p = problem(9, 3000, heads=16)
    expected = run(p, threads=2)[0]
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a hang must not outlive the test
        torch.set_num_threads(1)  # torch's own OpenMP team does not survive a fork; the kernel's pool must
        os._exit(0 if torch.equal(run(p, threads=2)[0], expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_more_threads_than_processors_or_work():
    p = problem(1, 3, heads=1)
    run(p, threads=64)
    assert error(p) <= TOLERANCE[torch.float32]
