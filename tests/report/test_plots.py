"""Plots are PNGs, the same bytes each time, in this process or another."""

import hashlib
import struct
import subprocess
import sys

import pytest

from phases.report import plots
from tests.report.sample_results import results


@pytest.mark.parametrize("plot", ["achieved", "speedups"])
def test_png_and_deterministic(plot):
    made = getattr(plots, plot)(results().benchmark)
    assert made[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", made[16:24])
    assert width == 900 and height >= 300
    assert b"Software" not in made and b"tIME" not in made and b"matplotlib" not in made
    code = f"import hashlib\nfrom phases.report import plots\nfrom tests.report.sample_results import results\nprint(hashlib.sha256(plots.{plot}(results().benchmark)).hexdigest())"
    other = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"MPLBACKEND": "svg", "HOME": "/nonexistent", "PATH": "/usr/bin"},
    )
    assert other.stdout.strip() == hashlib.sha256(made).hexdigest()


def test_other_numbers_give_another_picture():
    assert plots.achieved(results().benchmark) != plots.achieved(results(slow=1.5).benchmark)


def test_nothing_to_draw_is_empty():
    assert plots.achieved([]) == b"" and plots.speedups(results().benchmark[1:2]) == b""


@pytest.mark.parametrize("plot", ["achieved", "speedups"])
def test_axes_are_labelled_in_plain_numbers(plot, monkeypatch):
    from matplotlib.figure import Figure

    shown, save = [], Figure.savefig

    def saved(figure, *args, **kwargs):
        save(figure, *args, **kwargs)
        [axes] = figure.axes
        shown.extend(
            label.get_text() for axis in (axes.xaxis, axes.yaxis) for label in axis.get_ticklabels(which="both")
        )

    monkeypatch.setattr(Figure, "savefig", saved)
    getattr(plots, plot)(results().benchmark)
    numbers = [label for label in shown if label.replace(",", "").replace(".", "").isdigit()]
    assert len(numbers) >= 3 and "10" in numbers if plot == "speedups" else "1,000" in numbers
    assert not [label for label in shown if "$" in label or "\\" in label]
