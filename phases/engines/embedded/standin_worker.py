"""A stand-in for an SGLang server: a real process behind real HTTP that answers as one does, without a model.

It exists because hundreds of restarts are wanted, and a real server takes half a minute of a core to start. It takes
`-m sglang.launch_server`'s arguments, writes the fact files of a kernel's plugin, keeps SGLang's metrics, streams, and drains on SIGTERM.
What is wrong with it comes from the environment of its release: see `Faults`. Standard library only.
"""

from __future__ import annotations

import http.server
import json
import os
import random
import signal
import sys
import threading
import time

EDGES = [0.001 * 1.15**i for i in range(70)]
HISTOGRAMS = {
    "ttft": "sglang:time_to_first_token_seconds",
    "itl": "sglang:inter_token_latency_seconds",
    "e2e": "sglang:e2e_request_latency_seconds",
}


class Faults:
    """What is wrong: set by the `environment` of a side in the playbook, or for one worker by a file `fault` in its root, there for one backend if wanted."""

    def __init__(self, backend: str) -> None:
        own = os.path.join(os.environ.get("PHASEGATE_ROOT", "/nowhere"), "fault")
        local = json.load(open(own)) if os.path.exists(own) else {}
        local = local if local.get("only", backend) == backend else {}
        get = lambda name, default: float(local.get(name, os.environ.get("STANDIN_" + name, default)))  # noqa: E731
        self.crash = get("CRASH", 0)  # ends at once
        self.never_ready = get("NEVER_READY", 0)  # /health stays at 503
        self.mute = get("MUTE", 0)  # /health is green, no completion ever comes
        self.wedged_after = get("WEDGED_AFTER", 0)  # as mute, after so many requests
        self.slow = get("SLOW", 1)  # factor on every latency
        self.errors = get("ERRORS", 0)  # share of requests answered with 500
        self.aborts = get("ABORTS", 0)  # share of streams that begin with 200 and end in an abort
        self.refuses = get("REFUSES", 0)  # share of requests answered with 400
        self.wrong = get(
            "WRONG", 0
        )  # log-probabilities of its answers are off by so much, after its first `WRONG_AFTER` requests
        self.wrong_after = get("WRONG_AFTER", 0)
        self.mixed = get("MIXED", 0)  # the last rank reports another release
        self.dies_after = get("DIES_AFTER", 0)  # ends without a word after so many requests
        self.renamed = get("RENAMED", 0)  # its histograms have other names


class Worker:
    """Counts what it serves."""

    def __init__(self, arguments: list[str]) -> None:
        self.port = int(arguments[arguments.index("--port") + 1])
        self.backend = arguments[arguments.index("--attention-backend") + 1]
        self.faults = Faults(self.backend)
        self.ranks = int(arguments[arguments.index("--tp") + 1]) if "--tp" in arguments else 1
        self.dp = int(arguments[arguments.index("--dp-size") + 1]) if "--dp-size" in arguments else 1
        self.lock = threading.Lock()
        self.running = self.served = self.tokens = self.aborted = 0
        self.answers: dict[int, int] = {}
        self.buckets = {name: [0] * (len(EDGES) + 1) for name in HISTOGRAMS}
        self.sums = dict.fromkeys(HISTOGRAMS, 0.0)
        self.random = random.Random(self.port)

    def write_facts(self) -> None:
        """One file a rank, as the kernel's plugin writes them."""
        directory = next((value for key, value in os.environ.items() if key.endswith("_FACTS")), "")
        if not directory:
            return
        os.makedirs(directory, exist_ok=True)
        for rank in range(self.ranks):
            release = os.environ.get("PHASEGATE_RELEASE", "")
            if self.faults.mixed and rank == self.ranks - 1:
                release = "0" * 64
            facts = {
                "schema": "standin/facts/v1",
                "pid": os.getpid(),
                "rank": rank,
                "ranks": self.ranks,
                "release": release,
                "backend": self.backend,
                "variant": "standin",
                "build": "none",
                "device": "cpu",
                "choice": "candidate",
                "counters": {},
                "started": time.time(),
            }
            partial = os.path.join(directory, f".rank-{rank}.{os.getpid()}")
            with open(partial, "w") as file:
                json.dump(facts, file)
            os.replace(partial, os.path.join(directory, f"rank-{rank}.json"))

    def observe(self, name: str, seconds: float) -> None:
        place = next((i for i, edge in enumerate(EDGES) if seconds <= edge), len(EDGES))
        with self.lock:
            self.buckets[name][place] += 1
            self.sums[name] += seconds

    def answered(self, status: int) -> None:
        with self.lock:
            self.answers[status] = self.answers.get(status, 0) + 1
            self.served += 1
            last = bool(self.faults.dies_after) and self.served >= self.faults.dies_after
        if last:
            os._exit(9)

    def metrics(self) -> str:
        with self.lock:
            lines = ["# TYPE sglang:num_running_reqs gauge", f"sglang:num_running_reqs {self.running}"]
            lines += ["# TYPE sglang:num_queue_reqs gauge", "sglang:num_queue_reqs 0"]  # it answers all at once
            lines += [
                "# TYPE sglang:generation_tokens counter",
                f"sglang:generation_tokens_total {self.tokens}",
                "# TYPE sglang:num_aborted_requests counter",
                f"sglang:num_aborted_requests_total {self.aborted}",
                "# TYPE sglang:http_responses counter",
            ]
            lines += [
                f'sglang:http_responses_total{{endpoint="/generate",status_code="{code}"}} {count}'
                for code, count in sorted(self.answers.items())
            ]
            for name, metric in HISTOGRAMS.items():
                if self.faults.renamed:
                    metric = metric.replace("sglang:", "other:")
                lines.append(f"# TYPE {metric} histogram")
                total = 0
                for edge, count in zip([*(f"{edge:.6g}" for edge in EDGES), "+Inf"], self.buckets[name]):  # noqa: B905 - runs on Python 3.8 too
                    total += count
                    lines.append(f'{metric}_bucket{{le="{edge}"}} {total}')
                lines += [f"{metric}_count {total}", f"{metric}_sum {self.sums[name]}"]
        return "\n".join(lines) + "\n"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    worker: Worker

    def log_message(self, *arguments: object) -> None:
        pass

    def answer(self, status: int, data: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path.startswith("/health"):
            self.answer(503 if self.worker.faults.never_ready else 200, b"")
        elif self.path == "/metrics":
            self.answer(200, self.worker.metrics().encode(), "text/plain")
        else:
            release = os.environ.get("PHASEGATE_RELEASE", "")
            info = {
                "model_path": "standin",
                "served_model_name": "standin",
                "tp_size": self.worker.ranks,
                "dp_size": self.worker.dp,
                "release": release,
                "attention_backend": self.worker.backend,
                "data": [{"id": "standin"}],
            }
            self.answer(200, json.dumps(info).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if self.path != "/generate":
            return self.answer(200, b"{}")
        worker = self.worker
        with worker.lock:
            worker.running += 1
        try:
            self.generate(worker, body)
        finally:
            with worker.lock:
                worker.running -= 1

    def generate(self, worker: Worker, body: dict) -> None:
        faults, chance = worker.faults, worker.random.random()
        if faults.mute or (faults.wedged_after and worker.served >= faults.wedged_after):
            time.sleep(3600)
        if chance < faults.errors + faults.refuses:
            status = 500 if chance < faults.errors else 400
            worker.answered(status)
            return self.answer(status, b'{"error": "made to"}')
        tokens = int(body.get("sampling_params", {}).get("max_new_tokens", 16))
        started = time.monotonic()
        first, gap = (0.004 * worker.random.lognormvariate(0, 0.2) * faults.slow, 0.0005 * faults.slow)
        time.sleep(first)
        worker.observe("ttft", time.monotonic() - started)
        logprob = -0.1 - (faults.wrong if worker.served >= faults.wrong_after else 0)
        meta = {
            **self.prompt_logprobs(body),
            "prompt_tokens": 4,
            "finish_reason": {"type": "length", "length": tokens},
            "first_token_latency": first,
            "output_token_logprobs": [[logprob, token, None] for token in range(tokens)],
        }
        if body.get("stream"):
            self.stream(tokens, gap, meta)
        else:
            time.sleep(gap * tokens)
        seconds = time.monotonic() - started
        worker.observe("e2e", seconds)
        worker.observe("itl", gap)
        with worker.lock:
            worker.tokens += tokens
        meta |= {"e2e_latency": seconds, "completion_tokens": tokens}
        if not body.get("stream"):
            self.answer(
                200, json.dumps({"text": "x" * tokens, "output_ids": list(range(tokens)), "meta_info": meta}).encode()
            )
        worker.answered(200)

    def prompt_logprobs(self, body: dict) -> dict:
        """Log-probabilities of the prompt's tokens, where they are asked for: always the same, so two workers agree."""
        if "logprob_start_len" not in body:
            return {}
        ids = body.get("input_ids") or list(body["text"].encode()[:32])
        rows = [[-0.1, token, None] for token in ids[int(body["logprob_start_len"]) :]]
        return {"input_token_logprobs": rows, "input_top_logprobs": [[row] for row in rows]}

    def stream(self, tokens: int, gap: float, meta: dict) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for done in (1, tokens):
            if done > 1:
                time.sleep(gap * tokens)
            event = {
                "text": "x" * done,
                "output_ids": list(range(done)),
                "meta_info": {
                    **meta,
                    "completion_tokens": done,
                    "finish_reason": self.finish(meta["finish_reason"]) if done == tokens else None,
                },
            }
            self.chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def finish(self, reason: dict) -> dict:
        """How a stream ends: as asked, or given up, which no status shows."""
        worker = self.worker
        if worker.random.random() >= worker.faults.aborts:
            return reason
        with worker.lock:
            worker.aborted += 1
        return {"type": "abort", "message": "made to"}

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


class Server(http.server.ThreadingHTTPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128


def main(arguments: list[str]) -> None:
    worker = Worker(arguments)
    print("stand-in", os.environ.get("PHASEGATE_RELEASE", "")[:12], "starting", flush=True)
    if worker.faults.crash:
        sys.exit("no kernel image is available for execution on the device")
    Handler.worker = worker
    server = Server(("127.0.0.1", worker.port), Handler)

    def drain(*_: object) -> None:
        def end() -> None:
            server.shutdown()
            until = time.monotonic() + 20
            while worker.running and time.monotonic() < until:
                time.sleep(0.01)
            os._exit(0)

        threading.Thread(target=end).start()

    signal.signal(signal.SIGTERM, drain)
    worker.write_facts()
    server.serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    main(sys.argv[1:])
