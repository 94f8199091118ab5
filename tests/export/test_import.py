"""A Solution of others becomes a variant: proved and timed like any other, and only as it was imported."""

import hashlib
import json
import os
import re
import sys
import types
from pathlib import Path

import pytest

from phases.base.errors import KernelContractError
from phases.export import bring_in
from phases.export.write import export as write
from phases.harness import build, contract, parity, solutions
from phases.harness.definitions import every
from phases.harness.exchange import ExchangeError, Solution
from phases.ledger.git import Git
from tests.export.kernels import in_place, manifest, repository, results, solution

CASES = ["7x33"]
VARIETIES = {
    "returning": solution(),
    "in_place": in_place(
        "import torch\n\n\ndef run(x, y):\n    torch.mul(x, torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6), out=y)\n"
    ),
    "wrong": in_place("def run(x, y):\n    y.copy_(x)\n"),
    "raising": in_place("def run(x, y):\n    raise RuntimeError('no luck')\n"),
    "leaving": in_place("def run(x, y):\n    import os\n    os._exit(3)\n"),
    "nameless": in_place("def go(x, y):\n    pass\n"),
    "missing": in_place("import nothing_of_the_kind\n\n\ndef run(x, y):\n    pass\n"),
}
WRONG = {
    "wrong": "out of tolerance|error|off by",
    "raising": "no luck",
    "leaving": "exit code 3",
    "nameless": "no function run",
    "missing": "nothing_of_the_kind",
}


@pytest.fixture(scope="module")
def definition(tmp_path_factory):
    return bring_in.definition_for(repository(tmp_path_factory.mktemp("one") / "norm"), "norm_float32", None, "")


@pytest.fixture(scope="module")
def varieties(tmp_path_factory, definition):
    """A kernel with all of VARIETIES imported; its parity and build records by variant."""
    kernel = repository(tmp_path_factory.mktemp("all") / "norm")
    for name, data in VARIETIES.items():
        _, kernel = bring(kernel, data, definition, name)
    records = {r.variant: r for r in parity.prove(kernel, "cpu", list(VARIETIES), CASES)}
    return records, {r.variant: r for r in build.build(kernel, [], tmp_path_factory.mktemp("cache"))}


@pytest.fixture
def kernel(tmp_path):
    return repository(tmp_path / "norm")


def bring(kernel, data, definition, variant="theirs"):
    made = bring_in.import_solution(
        kernel,
        Solution.from_json(data, "given"),
        definition[0],
        covers_all=definition[1],
        variant=variant,
        role="candidate",
        device="any",
    )
    return made, contract.load(kernel.file)


def test_it_is_proved_like_any_other_and_its_digest_is_on_record(varieties):
    records, built = varieties
    for name in ("returning", "in_place"):
        assert records[name].ok, records[name].reason
        assert built[name].ok and built[name].sha256 == Solution.from_json(VARIETIES[name], "given").sha256
    assert built["norm"].arch == "python"


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_one_is_a_wrong_variant_and_no_more(varieties, name):
    records, built = varieties
    assert not records[name].ok and re.search(WRONG[name], records[name].reason), records[name].reason
    assert built[name].ok is (name not in ("nameless", "missing"))
    if not built[name].ok:
        assert re.search(WRONG[name], built[name].reason)


def test_it_is_a_candidate_among_the_others(kernel, definition):
    made, extended = bring(kernel, solution(), definition)
    assert extended.variants["theirs"].solution == made.solution.sha256 and list(extended.variants) == [
        "rows",
        "vectorised",
        "theirs",
    ]


def test_the_rest_of_kernel_yaml_stays_byte_for_byte(kernel, definition):
    before = kernel.file.read_text().splitlines()
    bring(kernel, solution(), definition)
    after = kernel.file.read_text().splitlines()
    assert [line for line in after if line not in before] == [line for line in after if "solution:" in line]
    assert [line for line in after if "solution:" not in line] == before


@pytest.mark.parametrize("path", ["../../../kernel.yaml", "/dev/zero", "pkg/../../../kernel.yaml", "~/x"])
def test_a_record_that_points_elsewhere_is_refused_unread(kernel, definition, path):
    made, _ = bring(kernel, solution(), definition)
    record = json.loads((made.directory / solutions.RECORD).read_text())
    record["solution"]["sources"][0]["path"] = path
    (made.directory / solutions.RECORD).write_text(json.dumps(record))
    with pytest.raises(KernelContractError, match="is no path below"):
        solutions.load("theirs", made.directory, made.solution.sha256)


def test_a_pipe_in_place_of_a_source_is_not_waited_for(kernel, definition):
    made, _ = bring(kernel, solution(), definition)
    file = made.directory / solutions.SOURCES / "pkg" / "parts.py"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(KernelContractError, match="a named pipe"):
        solutions.load("theirs", made.directory, made.solution.sha256)


def test_nothing_runs_that_is_not_what_was_imported(kernel, definition):
    made, extended = bring(kernel, solution(), definition)
    file = made.directory / solutions.SOURCES / "pkg" / "parts.py"
    file.write_text(file.read_text() + "print('changed')\n")
    with pytest.raises(KernelContractError, match="parts.py was changed after the import"):
        parity.prove(extended, "cpu", ["theirs"], CASES)
    record = json.loads((made.directory / solutions.RECORD).read_text())
    for item in record["solution"]["sources"]:  # whoever mends the record as well still meets the digest in kernel.yaml
        item["sha256"] = hashlib.sha256((made.directory / solutions.SOURCES / item["path"]).read_bytes()).hexdigest()
    (made.directory / solutions.RECORD).write_text(json.dumps(record))
    with pytest.raises(KernelContractError, match="kernel.yaml names"):
        parity.prove(extended, "cpu", ["theirs"], CASES)


def test_a_second_import_changes_nothing_and_another_under_the_name_is_refused(kernel, definition):
    bring(kernel, solution(), definition)
    text = kernel.file.read_text()
    made, extended = bring(contract.load(kernel.file), solution(name="renamed"), definition)
    assert made.again and kernel.file.read_text() == text
    with pytest.raises(ExchangeError, match="already, and it is another"):
        bring(extended, in_place("def run(x, y): pass"), definition)
    with pytest.raises(ExchangeError, match="already, and it is another"):
        bring(extended, solution(), definition, variant="rows")


def test_a_solution_of_something_else_is_refused(kernel, definition):
    with pytest.raises(ExchangeError, match="'gemm_n4096', which is no Definition of norm; it has norm_float32"):
        bring_in.definition_for(kernel, "gemm_n4096", None, "")
    with pytest.raises(ExchangeError, match="written in tilelang"):
        bring(kernel, solution(spec={"language": "tilelang"}), definition)


def test_a_definition_from_a_file_gives_the_order_of_arguments(kernel, definition):
    given = {
        "name": "their_norm",
        "op_type": "norm",
        "axes": {"r": {"type": "var"}, "c": {"type": "var"}},
        "reference": "def run(x):\n    return x\n",
        "inputs": {"x": {"shape": ["r", "c"], "dtype": "float32"}},
        "outputs": {"y": {"shape": ["r", "c"], "dtype": "float32"}},
    }
    made = Solution.from_json(solution(definition="their_norm"), "given")
    own, covers_all = bring_in.definition_for(kernel, "their_norm", given, "d.json")
    bring_in.import_solution(kernel, made, own, covers_all=covers_all, variant="theirs", role="candidate", device="any")
    assert covers_all and parity.prove(contract.load(kernel.file), "cpu", ["theirs"], CASES)[0].ok


def test_a_failed_import_leaves_nothing_behind(kernel, definition):
    text = kernel.file.read_text()
    start, end = text.index("variants:"), text.index("architectures:")
    kernel.file.write_text(
        text[:start] + "variants: {rows: {role: baseline}, vectorised: {role: candidate}}\n" + text[end:]
    )
    inline = contract.load(kernel.file)
    before = kernel.file.read_text()
    with pytest.raises(ExchangeError, match="not written as a block"):
        bring(inline, solution(), definition)
    assert kernel.file.read_text() == before and not (kernel.root / solutions.FOLDER / "theirs").exists()


def test_definitions_of_cases_for_a_gpu_are_known_without_one():
    """verify_attn's CUDA cases are of other heads and dtypes than its CPU cases."""
    names = every(contract.load(Path(__file__).parent.parent.parent / "kernels" / "verify_attn"))
    assert {"mla_verify_tree_h8_ckv512_kpe64_ps1_bfloat16", "mla_verify_tree_h64_ckv512_kpe64_ps1_float32"} <= set(
        names
    )


def test_an_exported_solution_runs_its_own_code_beside_the_kernel_of_the_same_name(kernel, definition, tmp_path):
    """The round trip: what comes back is what went out, whatever the kernel has become since."""
    write(kernel, results(), manifest(kernel), Git(kernel.file.parent), tmp_path / "out")
    (file,) = (tmp_path / "out/solutions/Ada").rglob("*.json")
    made, _ = bring(kernel, bring_in.read_record(file), definition)
    own = kernel.root / "norm" / "contract.py"
    text = own.read_text()
    assert "out=y)" in text
    own.write_text(text.replace("out=y)", "out=y)\n    y.add_(1)"))  # the kernel's own variant is wrong from now on
    found = {r.variant: r for r in parity.prove(contract.load(kernel.file), "cpu", ["vectorised", "theirs"], CASES)}
    assert not found["vectorised"].ok and found["theirs"].ok, found["theirs"].reason
    assert made.solution.to_json() == bring_in.read_record(file)


def test_modules_of_one_name_are_kept_apart(monkeypatch):
    outer, inner = types.ModuleType("twin"), types.ModuleType("twin")
    monkeypatch.setitem(sys.modules, "twin", outer)
    own = solutions.OwnModules(frozenset({"twin"}))
    with own:
        assert "twin" not in sys.modules
        sys.modules["twin"], sys.modules["twin.part"] = inner, inner
    assert sys.modules["twin"] is outer and "twin.part" not in sys.modules
    for late in (False, True):
        with own:
            assert sys.modules["twin"] is inner and sys.modules["twin.part"] is inner
            if late:
                sys.modules["twin.late"] = inner
        assert sys.modules["twin"] is outer and "twin.late" not in sys.modules
    with own:
        assert sys.modules["twin.late"] is inner


def test_names_imported_absolutely_are_found():
    sources = {
        "main.py": "import sys\nimport pkg.deep as d\nfrom .other import x",
        "pkg/deep.py": "from torch import nn",
        "other.py": "x = 1",
        "k.cu": "import main",
    }
    assert solutions.absolute_names(sources) == {"pkg"}
