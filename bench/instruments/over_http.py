"""An engine over HTTP, as the instruments use it: vLLM, or a simulated one."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from bench.instruments.engine import EngineReport, Generated, InstrumentError, OnTokens, Prefilled
from policies.types import Connector
from proxy.handoff.connectors import DIALECTS, engine_ids_of
from proxy.request.bodies import decode_leg, prefill_leg, transfer_params_of
from replayer.replay.client import send

CONTROL_TIMEOUT_S = 10.0
_WANTED = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:cache_config_info",
    "vllm:external_prefix_cache_hits",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
)


class HttpEngine:
    """One engine behind one URL.

    Args:
        http: client session; its owner closes it.
        name: for messages.
        url: base URL, without ``/v1``.
        model: served model.
        bootstrap_url: of its KV bootstrap server; None without one.
        connector: its KV connector.
        timeout_s: bound on one request, seconds.
        api_key: sent as a bearer token.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        name: str,
        url: str,
        model: str,
        *,
        bootstrap_url: str | None = None,
        connector: Connector = Connector.MOONCAKE,
        timeout_s: float = 300.0,
        api_key: str | None = None,
    ) -> None:
        self.name = name
        self.url = url
        self._http = http
        self.model = model
        self._bootstrap_url = bootstrap_url
        self._dialect = DIALECTS[connector]
        self._timeout_s = timeout_s
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    def now_s(self) -> float:
        """`time.perf_counter`, the clock of the replayer's client."""
        return time.perf_counter()

    def _body(self, prompt: Sequence[int], max_tokens: int) -> bytes:
        return msgspec.json.encode(
            {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "min_tokens": max_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                # Token ids would come with the prompt's, which takes time for a long one.
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
        )

    async def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        transfer: Mapping[str, Any] | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Generated:
        """Generate exactly ``max_tokens`` tokens (`MeasuredEngine.generate`)."""
        body = self._body(prompt, max_tokens)
        if transfer is not None:
            body = decode_leg(body, transfer)
        texts: list[str] = []

        def output(text: str, tokens: int, now_s: float) -> None:
            texts.append(text)
            if on_tokens is not None:
                on_tokens(tokens, now_s)

        answer = await send(self._http, f"{self.url}/v1/completions", body, self._headers, self._timeout_s, output)
        if not answer.ok or answer.first_token is None:
            raise InstrumentError(f"{self.name}: a request of {len(prompt):,} tokens failed: {answer.error}")
        return Generated(
            sent_s=answer.sent,
            first_s=answer.first_token,
            finished_s=answer.finished,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            text="".join(texts),
        )

    async def prefill(self, prompt: Sequence[int]) -> Prefilled:
        """Run the P leg of a hand-off (`MeasuredEngine.prefill`)."""
        engine_id = await self._engine_id() if self._dialect.needs_bootstrap else None
        transfer_id = f"measure-{uuid.uuid4().hex}"
        leg = prefill_leg(self._body(prompt, 1), self._dialect.prefill_params(transfer_id))
        sent_s = self.now_s()
        status, content = await self._exchange("POST", f"{self.url}/v1/completions", self._timeout_s, leg)
        finished_s = self.now_s()
        if status != 200:
            excerpt = content[:300].decode(errors="replace")
            raise InstrumentError(f"{self.name}: a P leg of {len(prompt):,} tokens was answered {status}: {excerpt}")
        try:
            params = self._dialect.decode_params(
                transfer_id, transfer_params_of(content), engine_id, self._bootstrap_url
            )
        except ValueError as error:
            raise InstrumentError(f"{self.name}: {error}") from error
        return Prefilled(sent_s, finished_s, params)

    async def report(self) -> EngineReport:
        """Read the engine's state (`MeasuredEngine.report`)."""
        status, content = await self._exchange("GET", f"{self.url}/metrics", CONTROL_TIMEOUT_S)
        if status != 200:
            raise InstrumentError(f"{self.name}: {self.url}/metrics answered {status}")
        return read_report(content.decode())

    async def version(self) -> str | None:
        """The engine's version; None where it has no ``/version``."""
        status, content = await self._exchange("GET", f"{self.url}/version", CONTROL_TIMEOUT_S)
        try:
            return str(msgspec.json.decode(content)["version"]) if status == 200 else None
        except (msgspec.DecodeError, KeyError, TypeError):
            return None

    async def max_model_len(self) -> int | None:
        """Longest prompt plus output in tokens, from ``/v1/models``; None where it is not reported."""
        _, content = await self._exchange("GET", f"{self.url}/v1/models", CONTROL_TIMEOUT_S)
        try:
            return int(msgspec.json.decode(content)["data"][0]["max_model_len"])
        except (msgspec.DecodeError, KeyError, TypeError, IndexError):
            return None

    async def _engine_id(self) -> str:
        if self._bootstrap_url is None:
            raise InstrumentError(
                f"{self.name} has no bootstrap server: give --from-bootstrap, or a fleet with a KV role"
            )
        status, content = await self._exchange("GET", f"{self._bootstrap_url}/query", CONTROL_TIMEOUT_S)
        try:
            return engine_ids_of(content)[0]
        except (ValueError, KeyError) as error:
            raise InstrumentError(f"{self._bootstrap_url}/query answered {status}, without an engine id") from error

    async def _exchange(self, method: str, url: str, timeout_s: float, body: bytes | None = None) -> tuple[int, bytes]:
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._http.request(method, url, data=body, headers=self._headers) as response,
            ):
                return response.status, await response.read()
        except TimeoutError as error:
            raise InstrumentError(f"{self.name}: no answer from {url} within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise InstrumentError(f"{self.name}: {url}: {error or type(error).__name__}; is the fleet up?") from error


def read_report(metrics: str) -> EngineReport:
    """An engine's state from its ``/metrics``; samples of several engine cores are added up."""
    lines = [line for line in metrics.splitlines() if line.startswith(_WANTED)]
    sums: dict[str, float] = {}
    pool: int | None = None
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
            if sample.name == "vllm:cache_config_info" and sample.labels.get("num_gpu_blocks", "").isdigit():
                pool = int(sample.labels["num_gpu_blocks"]) * int(sample.labels["block_size"])
    return EngineReport(
        running=int(sums.get("vllm:num_requests_running", 0)),
        waiting=int(sums.get("vllm:num_requests_waiting", 0)),
        pool_tokens=pool,
        external_tokens=sums.get("vllm:external_prefix_cache_hits_total"),
        queue_s=sums.get("vllm:request_queue_time_seconds_sum"),
        prefill_s=sums.get("vllm:request_prefill_time_seconds_sum"),
    )
