import gzip
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from phases.cli import failures
from phases.cli.main import cli
from tests.analysis.streams import arm
from tests.analysis.test_scrape import COARSE, FINE, histogram


def phase(*arguments, cwd=None):
    program = "import sys; from phases.cli.main import main; sys.argv[0] = 'phase'; main()"
    return subprocess.run(
        [sys.executable, "-c", program, "analyze", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=400,
    )


def write(path: Path, ratio: float, *, seconds=400.0, rate=10.0, bad=0.0, seed=1) -> Path:
    rng, rows = np.random.default_rng(seed), []
    for name in ("canary", "control"):
        times, values = arm(rng, ratio=ratio if name == "canary" else 1.0, seconds=seconds, rate=rate)
        for t, value in zip(times, values, strict=True):
            failed = name == "canary" and rng.random() < bad
            rows.append(
                {"t": float(t), "arm": name, "metric": "ttft", "status": 500 if failed else 200, "value": float(value)}
            )
    path.write_text("".join(json.dumps(row) + "\n" for row in sorted(rows, key=lambda row: row["t"])))
    return path


def test_a_slow_canary_exits_4_and_says_when_it_was_known(tmp_path):
    found = phase(write(tmp_path / "r.jsonl", 1.4), "--metric", "ttft", "--json", "--plot", tmp_path / "p.svg")
    assert found.returncode == 4, found.stderr
    answer = json.loads(found.stdout)
    decision = answer["decisions"][0]
    assert answer["verdict"] == decision["verdict"] == "FAIL"
    assert 1.05 < decision["low"] < 1.4 and decision["seconds_to_decide"] < 300
    assert "<svg" in (tmp_path / "p.svg").read_text()


def test_an_equal_canary_exits_0_and_a_short_recording_5(tmp_path):
    long = write(tmp_path / "long.jsonl", 1.0, seconds=900)
    found = phase(long, "--metric", "ttft", "--quantile", "0.5", "--margin", "0.1")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "verdict: PASS" in found.stdout and "PASS" in found.stdout
    short = write(tmp_path / "short.jsonl", 1.0, seconds=40)
    assert phase(short, "--metric", "ttft").returncode == 5


def test_standard_input_and_a_pipe_of_the_shell(tmp_path):
    path = write(tmp_path / "r.jsonl", 1.4)
    program = f"{sys.executable} -m phases.cli.main analyze --metric ttft --json"
    answers = [
        subprocess.run(
            ["bash", "-c", f"{program} {how}", "bash", str(path)], capture_output=True, text=True, timeout=400
        )
        for how in ('- < "$1"', '<(gzip -c "$1")', '/dev/stdin < <(cat "$1")')
    ]
    assert [answer.returncode for answer in answers] == [4, 4, 4], answers


def test_gzipped_records_and_errors(tmp_path):
    path = tmp_path / "r.gz"
    path.write_bytes(gzip.compress(write(tmp_path / "r", 1.0, bad=0.05).read_bytes()))
    found = phase(path, "--metric", "ttft", "--errors", "both", "--json")
    assert found.returncode == 4
    verdicts = {one["metric"]: one["verdict"] for one in json.loads(found.stdout)["decisions"]}
    assert verdicts["5xx"] == "FAIL" and verdicts["4xx"] != "FAIL"


def test_an_a_a_recording_says_what_can_be_seen(tmp_path):
    quiet = write(tmp_path / "a", 1.0, seconds=300)
    found = phase(write(tmp_path / "r", 1.4), "--metric", "ttft", "--quantile", "0.5", "--a-a", quiet, "--json")
    planned = json.loads(found.stdout)["a_a"]
    assert planned["dispersion"] >= 1.0 and planned["detectable"]["30"] < planned["detectable"]["5"]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["nowhere.jsonl"], 1, "nowhere.jsonl"),
        ([], 2, "usage"),
        (["canary=http://127.0.0.1:9/metrics"], 2, "each arm"),
        (["canary=ftp://x", "control=http://127.0.0.1:9/"], 1, "canary=http"),
        (["bad.jsonl"], 1, "bad.jsonl:1"),
        (["bad.jsonl", "--metric", "speed"], 2, "speed"),
        (["bad.jsonl", "--mean", "--quantile", "0.5"], 2, "exclude"),
        (["bad.jsonl", "--quantile", "7"], 2, "quantile 7"),
        (["bad.jsonl", "--margin", "-1"], 2, "margin -1"),
        (["bad.jsonl", "--errors", "5xx", "--tolerance", "2"], 2, "tolerance 2"),
        (["bad.jsonl", "--plot", "p.bmp"], 2, "p.bmp: name a file ending in .png"),
        (["bad.jsonl", "--plot", "p"], 2, "name a file ending in"),
        (["deep.jsonl"], 1, "deep.jsonl:2: nested too deeply"),
        (["huge.jsonl"], 1, "huge.jsonl:1: t is 1000"),
        (["pipe"], 1, "pipe: is a named pipe, not a file"),
        (["."], 1, "is a directory, not a file"),
        (["/dev/zero"], 1, "is a device, not a file"),
        (["torn.gz"], 1, "cannot read torn.gz"),
    ],
)
def test_bad_input_is_one_clear_error(tmp_path, monkeypatch, capsys, arguments, code, text):
    (tmp_path / "bad.jsonl").write_text('{"t": 1, "arm": "canary", "metric": "e2e", "value": NaN}\n')
    (tmp_path / "deep.jsonl").write_text("\n" + "[" * 100_000 + "\n")
    (tmp_path / "huge.jsonl").write_text(f'{{"t": 1{"0" * 400}, "arm": "canary", "metric": "e2e", "value": 1}}\n')
    (tmp_path / "torn.gz").write_bytes(gzip.compress(b"{}" * 50)[:10] + b"\xff" * 40)
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BaseException) as caught:  # as the process would end: in here it saves half a second a case
        cli.main(["analyze", *arguments], prog_name="phase", standalone_mode=False)
    assert failures.report(caught.value, as_json=False) == code
    said = capsys.readouterr().err
    assert text in said and "Traceback" not in said and "internal error" not in said


@pytest.mark.parametrize(("arguments", "code"), [(["nowhere.jsonl"], 1), (["nowhere.jsonl", "--quantile", "7"], 2)])
def test_bad_input_ends_the_process_with_its_code_and_no_traceback(tmp_path, arguments, code):
    found = phase(*arguments, cwd=tmp_path)
    assert (
        found.returncode == code
        and "nowhere.jsonl" in found.stderr + str(arguments)
        and "Traceback" not in found.stderr
    )


def test_snapshots_in_a_file(tmp_path):
    rng, seen, text = np.random.default_rng(3), {"canary": np.empty(0), "control": np.empty(0)}, ""
    for k in range(60):
        for name in seen:
            fresh = 0.2 * np.exp(0.5 * rng.standard_normal(200)) * (3.0 if name == "canary" else 1.0)
            seen[name] = np.append(seen[name], fresh)
            text += f"# scrape {10 * k} {name}\n" + histogram(seen[name], COARSE)
    (tmp_path / "snapshots.txt").write_text(text)
    found = phase(tmp_path / "snapshots.txt", "--metric", "ttft", "--json")
    assert found.returncode == 4, found.stdout + found.stderr
    assert json.loads(found.stdout)["decisions"][0]["low"] > 1.05


class _Metrics(BaseHTTPRequestHandler):
    """A server whose histogram grows by a hundred requests with every scrape."""

    def do_GET(self):
        served = self.server.served
        factor = 4.0 if self.path.startswith("/slow") else 1.0
        name = self.path
        served[name] = np.append(
            served.get(name, np.empty(0)), factor * 0.2 * np.exp(0.3 * self.server.rng.standard_normal(100))
        )
        body = histogram(served[name], FINE).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


def test_live_servers_are_scraped_until_the_verdict():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Metrics)
    server.served, server.rng = {}, np.random.default_rng(4)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        base = f"http://127.0.0.1:{server.server_port}"
        found = phase(
            f"canary={base}/slow",
            f"control={base}/usual",
            "--metric",
            "ttft",
            "--window",
            "0.5",
            "--settle",
            "0",
            "--deadline",
            "200",
            "--json",
        )
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert found.returncode == 4, found.stdout + found.stderr
    assert json.loads(found.stdout)["decisions"][0]["verdict"] == "FAIL"
