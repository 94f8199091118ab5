"""Stand-in for an SGLang server of several ranks: the plugin's real control, shadow and fact files, without a model.

It exists because a real server takes half a minute of a core to start. `hot_ranks.py PORT RANKS` answers /health and
/generate (with any tokens) and runs RANKS processes, each beginning a forward every 5 ms while the file `busy` is in its root.
"""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading
import time
import types
from pathlib import Path

# The package without its __init__, which imports torch: these modules need none, and hundreds of starts would wait for it.
sys.modules["verify_attn"] = types.ModuleType("verify_attn")
sys.modules["verify_attn"].__path__ = [str(Path(__file__).parents[2] / "kernels" / "verify_attn" / "verify_attn")]
from verify_attn.sglang.control import Control  # noqa: E402
from verify_attn.sglang.facts import FactFile  # noqa: E402
from verify_attn.sglang.identity import hot_facts  # noqa: E402


def rank(number: int, ranks: int, root: str, release: str) -> None:
    control = Control(os.path.join(root, "control"))
    reason = os.environ.get("HOT_REASON", "")
    identity = {"rank": number, "ranks": ranks, "release": release, "backend": "verify_attn", "build": "b"}
    facts = FactFile(
        os.path.join(root, "facts"),
        identity,
        lambda: {"variant": "cpu", "choice": control.choice, "hot": hot_facts(control, reason)},
        control,
    )
    forwards = 0
    while os.getppid() != 1:
        if os.path.exists(os.path.join(root, "busy")):
            forwards += 1
            control.decide(forwards)
        if os.path.exists(os.path.join(root, f"trip-{number}")):
            os.unlink(os.path.join(root, f"trip-{number}"))
            control.trip("shadow: layer 1 differs")
        time.sleep(0.005)
    del facts


STARTED = time.monotonic()


def metrics() -> str:
    """As if a hundred requests a second were answered, half of them within 0.1 s."""
    served = int(100 * (time.monotonic() - STARTED)) + 10
    name = "sglang:e2e_request_latency_seconds"
    rows = "".join(
        f'{name}_bucket{{le="{edge}"}} {count}\n'
        for edge, count in (("0.1", served // 2), ("0.2", served), ("+Inf", served))
    )
    return (
        f"# TYPE {name} histogram\n{rows}{name}_count {served}\n{name}_sum {0.1 * served}\n"
        f'# TYPE sglang:http_responses counter\nsglang:http_responses_total{{endpoint="/generate",status_code="200"}} {served}\n'
    )


def main() -> None:
    port, ranks, root, release = (
        int(sys.argv[1]),
        int(sys.argv[2]),
        os.environ["PHASEGATE_ROOT"],
        os.environ["PHASEGATE_RELEASE"],
    )
    for number in range(ranks):
        if os.fork() == 0:
            rank(number, ranks, root, release)
            os._exit(0)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(
                metrics().encode() if self.path == "/metrics" else json.dumps({"release": release}).encode()
            )

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            tokens = list(range(body["sampling_params"]["max_new_tokens"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(
                json.dumps(
                    {
                        "output_ids": tokens,
                        "text": "",
                        "meta_info": {"prompt_tokens": 1, "finish_reason": {"type": "length"}},
                    }
                ).encode()
            )

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
