"""`phase report` on the checkpoints this repository carries as plain files."""

import shutil
from pathlib import Path

from click.testing import CliRunner

from phases.base.errors import PhaseError
from phases.cli.main import cli

HERE = Path(__file__).parent.parent.parent
H200 = HERE / "checkpoints" / "h200"
PLAYBOOK = ("-p", str(HERE / "playbooks" / "local.yaml"))


def test_an_exported_checkpoint_gets_its_page_with_recorded_kernels_beside(tmp_path):
    target = tmp_path / "page.html"
    anchors = str(HERE / "tests" / "benchmarks" / "anchors_h200.json")
    done = CliRunner().invoke(
        cli,
        ["report", str(H200 / "0001-build-parity-PASS"), "--to", str(target), "--anchors", anchors, *PLAYBOOK],
        catch_exceptions=False,
    )
    page = target.read_text(encoding="utf-8")
    assert done.exit_code == 0 and "written to" in done.output
    assert "sglang_triton_tree_page1" in page and "another H200" in page and "speedup hopper / torch_gemm" in page


def test_a_phase_two_checkpoint_gets_one_too(tmp_path):
    done = CliRunner().invoke(
        cli,
        ["report", str(H200 / "0001-sglang-integration-INCONCLUSIVE"), "--to", str(tmp_path / "page.html"), *PLAYBOOK],
        catch_exceptions=False,
    )
    assert done.exit_code == 0 and "accept_length_ratio" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_an_altered_one_is_refused(tmp_path):
    copy = tmp_path / "0001-build-parity-PASS"
    shutil.copytree(H200 / copy.name, copy)
    (copy / "results.json").write_text((copy / "results.json").read_text().replace("hopper", "hoppla"))
    done = CliRunner().invoke(cli, ["report", str(copy), "--to", str(tmp_path / "page.html"), *PLAYBOOK])
    assert (
        isinstance(done.exception, PhaseError)
        and "was altered" in str(done.exception)
        and not (tmp_path / "page.html").exists()
    )
