"""Proving one variant right on one case, inside the worker.

Each check exists because a kernel that passes the others can fail it:

  right        fresh inputs, poisoned outputs, relative error against the float64 reference
  bounds       guard bytes around every output are intact
  inputs       every input tensor has the bytes it had
  finished     outputs do not change after run() has returned
  rerun        two more runs on the same inputs give the same bits
  companions   the same rows in other batches give the same bits (where the kernel claims it)
  fresh        other values *in the same memory* give the other result: no cache by pointer or shape
  sensitive    negating a sixteenth of the rows of every floating input changes the result as it changes the reference
  perturbed    the kernel's own perturbations (a flipped mask bit, one KV row) do too
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch

from phases.harness import guards
from phases.harness.buffers import GuardedOutputs, copied, fingerprint, same_bits, tensors_of, total_bytes
from phases.harness.channel import Channel
from phases.harness.compare import Comparison, compare
from phases.harness.entry import Entry, Json, Tensors, blame
from phases.harness.input_sets import free_memory

SETTLE_SECONDS = {"cpu": 0.02, "cuda": 0.005}  # a result must not change in this time after run() returned
RERUNS = 2
_PERTURBED_SHARE = 16  # one row of so many
_TWICE_BYTES = 8 << 20  # inputs up to this size are made twice, to see that a seed decides them
_KEEP_SHARE = 0.1  # inputs up to this share of the free memory are kept for the next variant


class Wrong(Exception):
    """A check failed; the text is the record's reason."""


@dataclass
class Proof:
    """What has been found out about one variant on one case."""

    error: float | None = None
    max_abs: float | None = None
    rerun_identical: bool | None = None
    batch_invariant: bool | None = None
    refused: str = ""
    reason: str = ""
    checks: list[str] = field(default_factory=list)

    def judge(self, comparison: Comparison, what: str) -> None:
        """Keep the worst error so far and raise Wrong when the comparison failed."""
        if comparison.error is not None:
            self.error = max(self.error or 0.0, comparison.error)
            self.max_abs = max(self.max_abs or 0.0, comparison.max_abs or 0.0)
        if not comparison.ok:
            raise Wrong(f"{what}{comparison.reason}")


def prove(job: Json, channel: Channel) -> None:
    """Prove every item of the job: {"case", "variants"}; emits one `parity` message per variant."""
    originals = guards.Originals()
    entry = Entry(job["kernel"])
    names = list(entry.kernel["variants"])
    for number, item in zip(job["numbers"], job["items"], strict=True):
        channel.at(number)
        bench = CaseBench(entry, item["case"], job["device"])
        for variant in item["variants"]:
            channel.variant(names.index(variant))
            proof = _prove_one(bench, variant, originals)
            channel.variant(-1)
            channel.send("parity", item=number, variant=variant, tolerance=bench.tolerance, **vars(proof))


def _prove_one(bench: CaseBench, variant: str, originals: guards.Originals) -> Proof:
    proof = Proof(refused=bench.entry.refuse(variant, bench.case, bench.device))
    if proof.refused:
        return proof
    try:
        _all_checks(bench, variant, proof)
    except Wrong as fault:
        proof.reason = str(fault)
    try:
        originals.check()
    except guards.Tampering as fault:
        proof.reason = str(fault)
    return proof


def _all_checks(bench: CaseBench, variant: str, proof: Proof) -> None:
    inputs = bench.inputs(0)
    outputs = GuardedOutputs(bench.entry.outputs(bench.case, bench.device))
    bench.run(variant, inputs, outputs)
    proof.judge(compare(outputs.tensors, bench.reference("first", inputs), bench.tolerance), "")
    first = outputs.snapshot()
    _finished(bench, outputs, first)
    proof.checks += ["right", "bounds", "inputs", "finished"]
    _reruns(bench, variant, inputs, outputs, first, proof)
    _companions(bench, variant, inputs, first, proof)
    inputs = overwrite(inputs, bench.inputs(1))
    bench.run(variant, inputs, outputs)
    proof.judge(
        compare(outputs.tensors, bench.reference("second", inputs), bench.tolerance),
        "with other values in the same memory: ",
    )
    proof.checks.append("fresh")
    second = outputs.snapshot()
    _own_perturbations(bench, variant, inputs, outputs, proof)
    negate_rows(inputs, bench.seed(2))
    _sensitive(bench, variant, inputs, outputs, second, proof)


def _finished(bench: CaseBench, outputs: GuardedOutputs, first: Tensors) -> None:
    guards.sleep(SETTLE_SECONDS[bench.device.partition(":")[0]])
    bench.synchronize()
    changed = [name for name, tensor in outputs.tensors.items() if not same_bits(tensor, first[name])]
    if changed:
        raise Wrong(f"{', '.join(changed)} changed after run() had returned")


def _reruns(
    bench: CaseBench, variant: str, inputs: Tensors, outputs: GuardedOutputs, first: Tensors, proof: Proof
) -> None:
    proof.rerun_identical = True
    for _ in range(RERUNS):
        bench.run(variant, inputs, outputs)
        changed = [name for name, tensor in outputs.tensors.items() if not same_bits(tensor, first[name])]
        if changed:
            proof.rerun_identical = False
            raise Wrong(f"a rerun on the same inputs gives other bits in {', '.join(changed)}")
    proof.checks.append("rerun")


def _companions(bench: CaseBench, variant: str, inputs: Tensors, first: Tensors, proof: Proof) -> None:
    for case, other_inputs, select in bench.entry.companions(bench.case, inputs):
        if bench.entry.refuse(variant, case, bench.device):
            continue
        outputs = GuardedOutputs(bench.entry.outputs(case, bench.device))
        bench.run(variant, other_inputs, outputs, case)
        selected = select(outputs.tensors)
        changed = [name for name, tensor in selected.items() if not same_bits(tensor, first[name])]
        proof.batch_invariant = not changed
        if changed:
            raise Wrong(f"the same rows in the batch {case['name']} give other bits in {', '.join(changed)}")
        proof.checks.append(f"companion {case['name']}")


def _own_perturbations(bench: CaseBench, variant: str, inputs: Tensors, outputs: GuardedOutputs, proof: Proof) -> None:
    for what, changed in bench.entry.perturbations(bench.case, inputs, bench.seed(3)):
        bench.run(variant, changed, outputs)
        proof.judge(
            compare(outputs.tensors, bench.reference(what, changed), bench.tolerance), f"after the change '{what}': "
        )
        proof.checks.append(what)


def _sensitive(
    bench: CaseBench, variant: str, inputs: Tensors, outputs: GuardedOutputs, before: Tensors, proof: Proof
) -> None:
    reference, unperturbed = bench.reference("negated", inputs), bench.reference("second", None)
    if not all(torch.equal(torch.isfinite(reference[name]), torch.isfinite(unperturbed[name])) for name in reference):
        return  # negated values are not valid inputs of this kernel
    bench.run(variant, inputs, outputs)
    proof.judge(compare(outputs.tensors, reference, bench.tolerance), "with some rows negated: ")
    reacts = any(not same_bits(outputs.tensors[name], before[name]) for name in before)
    if not reacts and any(not torch.equal(reference[name], unperturbed[name]) for name in reference):
        raise Wrong("the output does not react to changed inputs")
    proof.checks.append("sensitive")


class CaseBench:
    """One case on one device: its inputs by seed, references computed once, and checked runs."""

    def __init__(self, entry: Entry, case: Json, device: str) -> None:
        self.entry, self.case, self.device = entry, case, device
        self.tolerance = entry.tolerance(case)
        self._references: dict[str, Tensors] = {}
        self._pristine: dict[int, Tensors] = {}

    def seed(self, number: int) -> int:
        """Seeds differ between cases and are the same in every run."""
        return (zlib.crc32(f"{self.case['name']}/{self.case['dtype']}".encode()) + 7919 * number) & 0x7FFFFFFF

    def inputs(self, number: int) -> Tensors:
        """Inputs of seed `number`, in memory of their own; KernelContractError when the same seed gives other inputs."""
        if number in self._pristine:
            return copied(self._pristine[number])
        made = self.entry.inputs(self.case, self.seed(number), self.device)
        size = total_bytes(made)
        if size <= _TWICE_BYTES and fingerprint(made) != fingerprint(
            self.entry.inputs(self.case, self.seed(number), self.device)
        ):
            raise self.entry.broken("inputs() gives other inputs for the same seed", self.case)
        if size <= _KEEP_SHARE * free_memory(self.device):
            self._pristine[number] = copied(made)
        return made

    def reference(self, key: str, inputs: Tensors | None) -> Tensors:
        """float64 reference, computed once per key: the inputs behind a key are the same for every variant."""
        if key not in self._references:
            self._references[key] = self.entry.reference(self.case, inputs)
        return self._references[key]

    def run(self, variant: str, inputs: Tensors, outputs: GuardedOutputs, case: Json | None = None) -> None:
        """Poison, run, synchronise; Wrong when it raises, writes out of bounds or changes an input."""
        before = fingerprint(inputs)
        outputs.poison()
        try:
            self.entry.run(variant, case or self.case, inputs, outputs.tensors)
            self.synchronize()
        except (Exception, SystemExit) as fault:
            raise Wrong(f"run() raised {blame(fault)}") from fault
        unwritten = outputs.unwritten()  # looked at first: a late writer has had the least time
        if overrun := outputs.overrun():
            raise Wrong(overrun)
        after = fingerprint(inputs)
        if changed := [name for name in before if before[name] != after.get(name)]:
            raise Wrong(f"changed its inputs: {', '.join(changed)}")
        if unwritten == sum(tensor.numel() for tensor in outputs.tensors.values()) and unwritten:
            raise Wrong("no output was written when run() returned")

    def synchronize(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()


def overwrite(inputs: Any, fresh: Any) -> Any:
    """`fresh`'s values in `inputs`' memory wherever tensors agree in shape and dtype; other values are taken from `fresh`."""
    if isinstance(fresh, torch.Tensor):
        if isinstance(inputs, torch.Tensor) and inputs.shape == fresh.shape and inputs.dtype == fresh.dtype:
            return inputs.copy_(fresh)
        return fresh
    if isinstance(fresh, dict):
        old = inputs if isinstance(inputs, dict) else {}
        return {key: overwrite(old.get(key), value) for key, value in fresh.items()}
    if isinstance(fresh, (list, tuple)):
        old = list(inputs) if isinstance(inputs, (list, tuple)) else []
        old += [None] * (len(fresh) - len(old))
        return type(fresh)([overwrite(o, f) for o, f in zip(old, fresh, strict=False)])
    return fresh


def negate_rows(inputs: Tensors, seed: int) -> None:
    """Change the sign of a random sixteenth of the rows (first dimension), at least one, of every floating input, in place."""
    generator = torch.Generator().manual_seed(seed)
    for _, tensor in tensors_of(inputs):
        if tensor.is_floating_point() and tensor.dim() and tensor.shape[0]:
            count = -(-tensor.shape[0] // _PERTURBED_SHARE)
            rows = torch.randperm(tensor.shape[0], generator=generator)[:count].to(tensor.device)
            tensor[rows] = -tensor[rows]
