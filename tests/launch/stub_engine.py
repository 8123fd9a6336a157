"""A minimal engine: health, metrics, bootstrap /query, and a POST that makes it stale.

``python stub_engine.py PORT BOOTSTRAP_PORT [child]``: ``child`` also starts a child process, as vLLM does.
``STUB_SERVED`` in the environment is the number of requests it claims to have served already.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ENGINE_ID = str(uuid.uuid4())
STARTED = time.time()
served = int(os.environ.get("STUB_SERVED", "0"))


class Handler(BaseHTTPRequestHandler):
    """Answers the launcher's requests."""

    def do_GET(self) -> None:
        if self.path == "/query":
            return self._answer(json.dumps({"0": {"engine_id": ENGINE_ID, "worker_addr": {}}}))
        if self.path != "/metrics":
            return self._answer("ok")
        lines = [f"process_start_time_seconds {STARTED}"]
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            lines.append(f'vllm:{name}{{engine="0"}} 0')
        for name in ("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens"):
            lines.append(f"# TYPE vllm:{name} counter")
            lines.append(f'vllm:{name}_total{{engine="0"}} {served * 100}')
        return self._answer("\n".join(lines) + "\n")

    def do_POST(self) -> None:
        global served
        served += 1
        self._answer("{}")

    def _answer(self, text: str) -> None:
        body = text.encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """No log."""


if __name__ == "__main__":
    if "child" in sys.argv:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        print(f"child {child.pid}", flush=True)
    threading.Thread(
        target=ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever, daemon=True
    ).start()
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
