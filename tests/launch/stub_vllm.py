"""A stub that accepts vLLM's command line and environment, and behaves as its processes do, without a model.

An API server answers /health, /metrics, /v1/models and a bootstrap /query; an "EngineCore" is its child in a separate
session that ignores SIGTERM. Mooncake's log lines follow the environment. Settings of the stub itself:
``STUB_HIDE`` names a variable the EngineCore does not get, ``STUB_SILENT`` omits the transport's line,
``STUB_BLOCK`` is the block size it claims. Its metrics are those of an engine that has served already. POST /die makes
/health answer 503, as vLLM does when its engine has died.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CORE = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
ENGINE_ID = str(uuid.uuid4())
dead = threading.Event()


class Handler(BaseHTTPRequestHandler):
    """Answers the launcher's requests."""

    def do_GET(self) -> None:
        if self.path == "/metrics":
            labels = f'block_size="{os.environ.get("STUB_BLOCK", "16")}",cache_dtype="auto",engine="0"'
            return self._send(200, f"vllm:cache_config_info{{{labels}}} 1.0\nvllm:prompt_tokens_total 7\n")
        if self.path == "/v1/models":
            return self._send(200, json.dumps({"object": "list", "data": [{"id": "stub", "object": "model"}]}))
        return self._answer(503 if dead.is_set() and self.path == "/health" else 200)

    def do_POST(self) -> None:
        if self.path == "/die":
            dead.set()
        self._answer(200)

    def _answer(self, status: int) -> None:
        self._send(status, json.dumps({"0": {"engine_id": ENGINE_ID, "worker_addr": {}}}))

    def _send(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """No log."""


def option(name: str) -> str | None:
    """Value of a command-line option."""
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else None


if __name__ == "__main__":
    environment = {name: value for name, value in os.environ.items() if name != os.environ.get("STUB_HIDE")}
    subprocess.Popen([sys.executable, "-c", CORE], env=environment, start_new_session=True)
    # vLLM's API server stops its engine itself; this one leaves it running.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    transfer = json.loads(option("--kv-transfer-config") or "{}")
    if transfer and "STUB_SILENT" not in os.environ:
        line = "Using Intra-Node NVLink transport" if "MC_INTRANODE_NVLINK" in os.environ else ""
        print(f"I1121 04:22:53 transfer_engine_impl.cpp:1] {line or 'TcpTransport: listen on port 16599'}", flush=True)
    if transfer.get("kv_role") in {"kv_both", "kv_producer"}:
        bootstrap = ThreadingHTTPServer(("127.0.0.1", int(os.environ["VLLM_MOONCAKE_BOOTSTRAP_PORT"])), Handler)
        threading.Thread(target=bootstrap.serve_forever, daemon=True).start()
    ThreadingHTTPServer(("127.0.0.1", int(option("--port") or 0)), Handler).serve_forever()
