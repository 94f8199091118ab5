"""Results as plain text for a terminal: fixed width, at most WIDTH columns, nothing that needs colour or Unicode art."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phases.base.results import BenchmarkRecord, BuildRecord, Ceiling, ParityRecord, Results

WIDTH = 120
_GAP = "  "

Anchors = Mapping[str, Mapping[str, float]]  # case key: {label: seconds}, times of other kernels to show beside


@dataclass(frozen=True)
class Column:
    head: str
    cells: tuple[str, ...]
    left: bool = False

    @property
    def width(self) -> int:
        return max(len(self.head), *map(len, self.cells), 0) if self.cells else len(self.head)


def table(columns: Sequence[Column]) -> str:
    """Columns side by side under a ruled head; no trailing blanks."""

    def line(texts: Iterable[str]) -> str:
        parts = [text.ljust(c.width) if c.left else text.rjust(c.width) for c, text in zip(columns, texts, strict=True)]
        return _GAP.join(parts).rstrip()

    rows = zip(*(column.cells for column in columns), strict=True)
    return "\n".join([line(c.head for c in columns), line("-" * c.width for c in columns), *map(line, rows)])


def wrap(text: str, indent: str = "    ", width: int = WIDTH) -> str:
    """Text folded at blanks into lines of at most `width`, all but the first indented; longer words are cut."""
    import textwrap

    return "\n".join(textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)) or text


def seconds(value: float | None) -> str:
    """A time with three figures and its unit; `-` for none."""
    if value is None:
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{_three(value / scale)} {unit}"
    return f"{value * 1e9:.0f} ns"


def rate(value: float | None, scale: float) -> str:
    return "-" if value is None else _three(value / scale)


def _three(value: float) -> str:
    """Three figures, without an exponent."""
    if value == 0:
        return "0"
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}" if value >= 0.0995 else f"{value:.3g}"


# -- the whole -------------------------------------------------------------------------------------------------------------


def report(results: Results, anchors: Anchors | None = None) -> str:
    """Everything Phase 1 measured, section by section."""
    parts = [f"{results.kernel}: {results.phase}", _facts(results)]
    parts += [
        section
        for section in (
            build(results.build),
            parity(results.parity),
            ceilings(results.ceilings),
            benchmark(results.benchmark, anchors),
        )
        if section
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _facts(results: Results) -> str:
    lines = [
        wrap(f"{key}: {value}")
        for key, value in results.facts.items()
        if isinstance(value, (str, int, float)) and value != ""
    ]
    return "\n".join(lines)


# -- build and parity --------------------------------------------------------------------------------------------------------


def build(records: Sequence[BuildRecord]) -> str:
    if not records:
        return ""
    state = tuple(("from cache" if r.cached else f"built in {r.seconds:.1f} s") if r.ok else "FAILED" for r in records)
    shown = table(
        [
            Column("variant", tuple(_cut(r.variant, 40) for r in records), left=True),
            Column("architecture", tuple(r.arch for r in records), left=True),
            Column("object", state, left=True),
            Column("sha256", tuple(r.sha256[:16] for r in records), left=True),
        ]
    )
    failures = [wrap(f"  {r.variant} {r.arch}: {' '.join(r.reason.split())[:600]}") for r in records if not r.ok]
    return "\n".join(["Build", shown, *failures])


def parity(records: Sequence[ParityRecord]) -> str:
    """One line a variant and dtype, then every wrong case, then why cases were refused."""
    if not records:
        return ""
    groups: dict[tuple[str, str, str], list[ParityRecord]] = {}
    for record in records:
        groups.setdefault((record.variant, record.device, record.case.dtype), []).append(record)
    rows = [_parity_row(key, group) for key, group in groups.items()]
    heads = (
        "variant",
        "device",
        "dtype",
        "right",
        "wrong",
        "refused",
        "worst error",
        "tolerance",
        "reruns",
        "batch-invariant",
    )
    columns = [Column(head, tuple(row[i] for row in rows), left=i < 3) for i, head in enumerate(heads)]
    wrong = [wrap(f"  WRONG {r.variant} {r.case.key}: {r.reason}") for r in records if not r.ok and not r.refused]
    return "\n".join(["Parity against the float64 reference", table(columns), *wrong, *_refusals(records)])


def _refusals(records: Sequence[ParityRecord] | Sequence[BenchmarkRecord]) -> list[str]:
    """One line a variant and reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if record.refused:
            reasons.setdefault((record.variant, record.refused), []).append(record.case.key)
    return [
        wrap(f"  {variant} refuses {len(keys)} ({keys[0]}{', ...' if len(keys) > 1 else ''}): {why}")
        for (variant, why), keys in reasons.items()
    ]


def _parity_row(key: tuple[str, str, str], group: list[ParityRecord]) -> tuple[str, ...]:
    errors = [r.error for r in group if r.error is not None]
    reruns = [r.rerun_identical for r in group if r.rerun_identical is not None]
    invariant = [r.batch_invariant for r in group if r.batch_invariant is not None]
    refused = sum(bool(r.refused) for r in group)
    right = sum(r.ok for r in group)
    return (
        _cut(key[0], 24),
        key[1],
        key[2],
        str(right),
        str(len(group) - right - refused),
        str(refused),
        f"{max(errors):.1e}" if errors else "-",
        f"{group[0].tolerance:.0e}" if group[0].tolerance else "-",
        _all(reruns, "identical", "DIFFER"),
        _all(invariant, "yes", "NO"),
    )


def _all(flags: list[bool], yes: str, no: str) -> str:
    return "-" if not flags else yes if all(flags) else no


# -- ceilings and benchmark ------------------------------------------------------------------------------------------------------


def ceilings(measured: Sequence[Ceiling]) -> str:
    if not measured:
        return ""
    names = {"read": "read", "copy": "copy (read + write)", "gather": "gather of random rows"}
    texts = [
        (
            c.device,
            names.get(c.kind, c.kind.replace("flops_", "arithmetic ")),
            f"{_three(c.value / 1e9)} GB/s" if not c.kind.startswith("flops") else f"{_three(c.value / 1e12)} TFLOP/s",
            str(len(c.samples)),
        )
        for c in measured
    ]
    columns = [
        Column(head, tuple(t[i] for t in texts), left=i < 2)
        for i, head in enumerate(("device", "ceiling", "measured", "samples"))
    ]
    return "\n".join(["Ceilings of this very device, measured in the same run", table(columns)])


def benchmark(records: Sequence[BenchmarkRecord], anchors: Anchors | None = None) -> str:
    """Cases down, variants across; as many variants side by side as fit, the baseline in every block."""
    if not records:
        return ""
    keys = list(dict.fromkeys(r.case.key for r in records))
    variants = list(dict.fromkeys(r.variant for r in records if not r.refused))
    by = {(r.case.key, r.variant): r for r in records}
    baseline = next((r.variant for r in records if r.role == "baseline"), None)
    front = [
        Column("case", tuple(keys), left=True),
        Column("floor", tuple(seconds(_floor(records, key)) for key in keys)),
    ]
    groups = [(variant, _variant_columns(variant, keys, by, baseline)) for variant in variants]
    groups += [
        (label, [Column("time", tuple(seconds(anchors.get(key, {}).get(label)) for key in keys))])
        for label in _labels(anchors, keys)
    ]
    head = "Benchmark: medians; speedup over the baseline's median; needed bytes once; share of the roofline floor"
    parts = [head + "\n" + "\n\n".join(_block(front, block) for block in _blocks(front, groups))]
    notes = _refusals(records)
    notes += [wrap(f"  {r.variant} {r.case.key}: NO NUMBER: {r.reason}") for r in records if r.reason and not r.refused]
    unsettled = [r.variant + " " + r.case.key for r in records if r.samples and r.detail.get("settled") is False]
    if unsettled:
        notes.append(
            wrap(
                f"  * warm-up sweeps did not agree, expect noise: {', '.join(unsettled[:8])}{' ...' if len(unsettled) > 8 else ''}"
            )
        )
    return "\n".join(parts + notes)


def _variant_columns(
    variant: str, keys: list[str], by: Mapping[tuple[str, str], BenchmarkRecord], baseline: str | None
) -> list[Column]:
    found = [by.get((key, variant)) for key in keys]
    columns = [Column("time", tuple(_time(r) for r in found))]
    if variant != baseline and baseline is not None:
        columns.append(
            Column("speedup", tuple(_speedup(r, by.get((key, baseline))) for key, r in zip(keys, found, strict=True)))
        )
    columns.append(
        Column("GB/s", tuple(rate(r.bytes_needed / r.median, 1e9) if r and r.median else "-" for r in found))
    )
    columns.append(Column("TFLOP/s", tuple(rate(r.flops / r.median, 1e12) if r and r.median else "-" for r in found)))
    columns.append(
        Column(
            "roof",
            tuple(
                f"{r.roofline_seconds / r.median:.0%}" if r and r.median and r.roofline_seconds else "-" for r in found
            ),
        )
    )
    return columns


def _time(record: BenchmarkRecord | None) -> str:
    if record is None:
        return ""
    if record.refused:
        return "refused"
    mark = "*" if record.detail.get("settled") is False else ""
    return seconds(record.median) + mark if record.samples else "NONE"


def _speedup(record: BenchmarkRecord | None, baseline: BenchmarkRecord | None) -> str:
    return (
        f"{_three(baseline.median / record.median)}x"
        if record and record.median and baseline and baseline.median
        else "-"
    )


def _floor(records: Sequence[BenchmarkRecord], key: str) -> float | None:
    return next((r.roofline_seconds for r in records if r.case.key == key and r.roofline_seconds), None)


def _labels(anchors: Anchors | None, keys: list[str]) -> list[str]:
    return list(dict.fromkeys(label for key in keys for label in (anchors or {}).get(key, {})))


def _group_width(name: str, columns: list[Column]) -> int:
    return max(len(name), sum(c.width for c in columns) + len(_GAP) * (len(columns) - 1))


def _blocks(front: list[Column], groups: list[tuple[str, list[Column]]]) -> list[list[tuple[str, list[Column]]]]:
    """Groups of columns packed into blocks no wider than WIDTH."""
    room = WIDTH - sum(c.width + len(_GAP) for c in front)
    blocks: list[list[tuple[str, list[Column]]]] = [[]]
    used = 0
    for name, columns in groups:
        need = _group_width(name, columns) + len(_GAP)
        if blocks[-1] and used + need > room + len(_GAP):
            blocks.append([])
            used = 0
        blocks[-1].append((name, columns))
        used += need
    return blocks


def _block(front: list[Column], groups: list[tuple[str, list[Column]]]) -> str:
    """One block: variant names over their columns, then the table."""
    head = _GAP.join(" " * c.width for c in front)
    columns = list(front)
    for name, own in groups:
        width = sum(c.width for c in own) + len(_GAP) * (len(own) - 1)
        if len(name) > width:  # a name wider than its columns widens the last one
            last = own[-1]
            own = [*own[:-1], Column(last.head.rjust(last.width + len(name) - width), last.cells)]
            width = len(name)
        head += _GAP + name.ljust(width)
        columns += own
    return head.rstrip() + "\n" + table(columns)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 2] + ".."


# -- survey ------------------------------------------------------------------------------------------------------------------


def survey(found: Any) -> str:
    """A `phases.harness.survey.Survey`: what is installed, then why each kernel can or cannot do the job."""
    where = f"sm_{found.sm}" if found.sm else "no GPU"
    head = f"Python {found.python}, torch {found.torch or 'absent'}, GPUs: {', '.join(found.gpus) or 'none'}; asked: page size {found.page_size}, {where}"
    rows = found.kernels
    shown = table(
        [
            Column("kernel", tuple(k.name for k in rows), left=True),
            Column("version", tuple(_cut(k.version or "-", 16) for k in rows), left=True),
            Column(
                "built for",
                tuple(_cut(", ".join(k.built_for) or ("on first use" if k.installed else "-"), 34) for k in rows),
                left=True,
            ),
            Column("tree", tuple(_answer(k.tree.ok) for k in rows)),
            Column(f"page {found.page_size}", tuple(_answer(k.page.ok) for k in rows)),
            Column(where, tuple(_answer(k.gpu.ok) for k in rows)),
            Column("usable", tuple(_answer(k.usable) for k in rows)),
        ]
    )
    notes = []
    for kernel in rows:
        broken = [f"import: {kernel.imports}"] if kernel.imports not in ("", "ok") else []
        reasons = [
            *broken,
            *(
                f"{what}: {answer.why}"
                for what, answer in (("tree", kernel.tree), ("page", kernel.page), ("gpu", kernel.gpu))
            ),
        ]
        notes.append(wrap(f"  {kernel.name}: {'; '.join(reasons)} [{kernel.source}]"))
    return "\n".join([wrap(head), shown, "", *notes]) + "\n"


def _answer(ok: bool | None) -> str:
    return "?" if ok is None else "yes" if ok else "no"
