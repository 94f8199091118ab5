"""Parity: every variant on every case against the float64 reference, with crashes and hangs as records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phases.base.errors import KernelContractError
from phases.base.results import Case, ParityRecord
from phases.harness import process
from phases.harness.contract import Kernel, Progress, case_json, describe, select, silent, to_json

_GIVE_UP_AFTER = 2  # a variant that killed so many workers is not tried on further cases


def prove(
    kernel: Kernel,
    device: str,
    variants: Sequence[str] | None = None,
    cases: Sequence[Case | str] | None = None,
    progress: Progress = silent,
    *,
    silence: float = process.SILENCE_SECONDS,
) -> tuple[ParityRecord, ...]:
    """Prove the kernel's variants for `device` on its parity cases.

    Args:
        device: cpu or cuda.
        variants: limited to these; all of the device when None.
        cases: Cases, or shell patterns of case names or keys; all parity cases when None.
        silence: seconds without a sign of life after which a run counts as hung.

    Returns:
        One record per case and variant, cases outermost.

    Raises:
        KernelContractError: the contract module itself is at fault, whatever the variant.
        UsageError: an unknown variant, or a pattern that matches no case.
    """
    names = kernel.variants_for(device, variants)
    chosen = select(describe(kernel, device)["parity"], cases, "parity")
    run = _Run(kernel, device, names, chosen, progress, silence)
    run.finish()
    return tuple(run.records[number, name] for number in range(len(chosen)) for name in names)


class _Run:
    """Workers started one after the other until every (case, variant) has its record."""

    def __init__(
        self,
        kernel: Kernel,
        device: str,
        names: tuple[str, ...],
        cases: tuple[Case, ...],
        progress: Progress,
        silence: float,
    ) -> None:
        self.kernel, self.device, self.names, self.cases = kernel, device, names, cases
        self.progress, self.silence = progress, silence
        self.records: dict[tuple[int, str], ParityRecord] = {}
        self.deaths: dict[str, list[str]] = {name: [] for name in names}

    def finish(self) -> None:
        while items := self._missing():
            death = process.run(self._job(items), self._listen, silence=self.silence)
            if death is None:
                if self._missing():
                    raise KernelContractError(f"the worker of {self.kernel.name} ended without finishing its cases.")
                return
            self._bury(death)

    def _missing(self) -> list[tuple[int, list[str]]]:
        rows = [(n, [name for name in self.names if (n, name) not in self.records]) for n in range(len(self.cases))]
        return [(number, names) for number, names in rows if names]

    def _job(self, items: list[tuple[int, list[str]]]) -> dict[str, Any]:
        return {
            "op": "parity",
            "kernel": to_json(self.kernel),
            "device": self.device,
            "numbers": [number for number, _ in items],
            "items": [{"case": case_json(self.cases[number]), "variants": names} for number, names in items],
        }

    def _listen(self, message: dict[str, Any]) -> None:
        if message["type"] != "parity":
            return
        record = ParityRecord(
            case=self.cases[message["item"]],
            variant=message["variant"],
            device=self.device,
            ok=not message["reason"] and not message["refused"],
            error=message["error"],
            tolerance=message["tolerance"],
            max_abs=message["max_abs"],
            rerun_identical=message["rerun_identical"],
            batch_invariant=message["batch_invariant"],
            refused=message["refused"],
            reason=message["reason"],
        )
        self._keep(message["item"], record)

    def _keep(self, number: int, record: ParityRecord) -> None:
        self.records[number, record.variant] = record
        state = "ok" if record.ok else f"refused: {record.refused}" if record.refused else f"WRONG: {record.reason}"
        error = f" error {record.error:.2g}" if record.error is not None else ""
        self.progress(
            f"parity {len(self.records)} of {len(self.cases) * len(self.names)}, {record.case.key} {record.variant}: {state}{error}"
        )

    def _bury(self, death: process.Death) -> None:
        variant = list(self.kernel.variants)[death.variant] if death.variant >= 0 else ""
        if death.item < 0 or not variant:
            at = f" on case {self.cases[death.item].key}" if death.item >= 0 else ""
            raise KernelContractError(
                f"{self.kernel.entry}{at}: the worker {death.reason}.",
                hint="This happened in the contract module itself (import, inputs, outputs or reference).",
            )
        self.deaths[variant].append(death.reason)
        self._keep(death.item, self._failed(death.item, variant, f"the process {death.reason}"))
        if len(self.deaths[variant]) >= _GIVE_UP_AFTER:
            for number, names in self._missing():
                if variant in names:
                    self._keep(
                        number,
                        self._failed(number, variant, f"not tried: the variant ended {_GIVE_UP_AFTER} workers before"),
                    )

    def _failed(self, number: int, variant: str, reason: str) -> ParityRecord:
        tolerance = self.kernel.tolerances.get(self.cases[number].dtype)
        return ParityRecord(
            case=self.cases[number], variant=variant, device=self.device, ok=False, tolerance=tolerance, reason=reason
        )
