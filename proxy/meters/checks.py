"""Conditions that the meters raise: drift past a bound, and failures that show in no error, only in zeros.

Each finding must last before its condition is raised, and must be absent for some time before it is ok again. The
findings are open to every client, so they have names and counts, but no error texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from policies.ledger import Ledger
from policies.meters.latch import Latch
from policies.predict.exact_index import ExactIndex
from proxy.clip import clip
from proxy.events.subscriber import EventSubscriber
from proxy.fleet.instances import Instances
from proxy.meters.engine import EngineMeter, EngineSums
from proxy.meters.session_headers import SessionHeaders
from proxy.settings import MeterSettings

FLEET = ""
"""Key of what concerns no single instance."""
_MISLEADING_SHARE = 0.5
"""Share of the tokens predicted from KV events that were not cached, from which on the events mislead."""
_ORDERED_SHARE = 0.25
"""Share of the pairs of waiting prefills below which an engine does not compute them by their due times. In one step of
an engine several short prompts are computed together, and have their first tokens in any order."""
_MIN_SILENT = 2
_TRANSIENT = frozenset({"", "no_events", "waiting_for_events", "replaying"})
"""Reasons without trust in the exact index that pass by themselves; lasting silence is found by its own check."""

_OWN_CONDITION = MappingProxyType({"several_cache_groups": "hybrid_events", "block_size": "block_size"})
"""Reasons without trust that another condition than kv_events is about, with its remedy."""

REMEDIES = MappingProxyType(
    {
        "prediction_drift": "send all traffic of the engines through this proxy, or set events_url and "
        "tokenizer.path; GET /meters has the figures",
        "ledger_drift": "send all traffic of the engines through this proxy; if the ledger has more, look for an "
        "engine that hangs, or for a hop that queues requests before it",
        "transfer_drift": "check the transport between the instances with warmroute doctor, then their load; "
        "GET /meters has the figures",
        "kv_events": "check --kv-events-config of the engine, events_url and the network between; set "
        "events_replay_url to recover missed events",
        "hash_seed": "start every engine with the same PYTHONHASHSEED, or set meters.equal_hash_seeds: never if "
        "nothing shares KV by hash",
        "block_size": "start every engine with the same --block-size",
        "context_length": "start every engine of a model with the same --max-model-len, or give it a name of its own: "
        "--served-model-name",
        "data_parallel": "set data_parallel_size of the instance to the engine's --data-parallel-size",
        "session_headers": "let the hop before this proxy pass the session headers of docs/identity.md on, or set them "
        "in the client",
        "engine_headers": "let the hop between this proxy and the engine pass request headers on, or connect to the "
        "engine directly",
        "hybrid_events": "remove events_url of the instance: models with several cache groups report blocks that "
        "cannot be reused",
        "priority_scheduling": "start the engine with --scheduling-policy priority, or remove priority_scheduling of "
        "the instance",
        "prefix_cache": "start the engine with --enable-prefix-caching",
        "cached_token_reports": "start the engine with --enable-prompt-tokens-details",
    }
)
"""Condition -> action that makes it ok."""
MEANINGS = MappingProxyType(
    {
        "prediction_drift": "predicted cached tokens agree with the engines' reports",
        "ledger_drift": "the ledger agrees with the engines' running and waiting requests",
        "transfer_drift": "predicted hand-off times agree with measured ones",
        "kv_events": "KV events arrive where they are expected",
        "hash_seed": "no difference between the engines' block hashes",
        "block_size": "all engines have blocks of one size",
        "context_length": "all engines of a model accept prompts of one length",
        "data_parallel": "the engines have the data-parallel ranks that are configured",
        "session_headers": "session ids arrive as before",
        "engine_headers": "engines receive the request headers, as far as their answers show",
        "hybrid_events": "tokens predicted from KV events are cached",
        "priority_scheduling": "engines compute waiting prompts in the order that they are given",
        "prefix_cache": "repeated prefixes are found in the engines' caches",
        "cached_token_reports": "engines report the cached tokens that they count",
    }
)
"""Condition -> detail while it is ok."""


class Checks:
    """The examination of all meters; ``failing`` has its last result."""

    def __init__(
        self,
        settings: MeterSettings,
        exact: ExactIndex,
        ledger: Ledger,
        instances: Instances,
        events: EventSubscriber,
    ) -> None:
        self.settings = settings
        self._ledger = ledger
        self._exact = exact
        self._instances = instances
        self._events = events
        self._latches: dict[tuple[str, str], Latch] = {}
        self.failing: dict[str, dict[str, str]] = {name: {} for name in REMEDIES}

    def forget(self, name: str) -> None:
        """Drop an instance that has left the fleet."""
        for key in [key for key in self._latches if key[1] == name]:
            del self._latches[key]
        for found in self.failing.values():
            found.pop(name, None)

    def examine(self, engines: Mapping[str, EngineMeter], headers: SessionHeaders, away: int, now_s: float) -> None:
        """Examine everything once; ``away``: hand-offs in flight."""
        found: dict[str, dict[str, str]] = {name: {} for name in REMEDIES}
        # An engine that is down has the condition `instances`; its figures are old.
        engines = {each.name: engines[each.name] for each in self._instances if each.up and each.name in engines}
        for name, meter in engines.items():
            for condition, text in self._of_requests(meter, now_s):
                found[condition][name] = text
            self._of_engine(name, meter, away, engines, found)
        self._of_events(engines, found, now_s)
        self._of_fleet(headers, found)
        self._latch(found, now_s)

    def _of_requests(self, meter: EngineMeter, now_s: float) -> list[tuple[str, str]]:
        """Findings in what one instance has reported with its answers. At most one: one fault causes several."""
        sums, least = meter.sums(now_s), self.settings.min_requests
        found: list[tuple[str, str]] = []
        if sums.transfers >= least and (sums.transfer_error() or 0) > self.settings.transfer_error:
            text = f"hand-offs differ by {sums.transfer_error():.0%} from their predicted times"
            found.append(("transfer_drift", text))
        if meter.caching_off:
            found.append(("prefix_cache", "its prefix cache is disabled"))
        elif sums.repeats >= least and not sums.reported_tokens:
            found.append(_no_hits(sums, meter.engine_hits(now_s)))
        elif sums.exact_requests >= least and sums.exact_over_tokens > _MISLEADING_SHARE * sums.exact_tokens:
            over = sums.exact_over_tokens / sums.exact_tokens
            found.append(("hybrid_events", f"{over:.0%} of the tokens predicted from its KV events were not cached"))
        elif sums.requests >= least and (sums.prediction_error() or 0) > self.settings.prediction_error:
            found.append(("prediction_drift", f"{sums.prediction_error():.0%} of its prompt tokens predicted wrongly"))
        return found

    def _of_engine(
        self,
        name: str,
        meter: EngineMeter,
        away: int,
        engines: Mapping[str, EngineMeter],
        found: dict[str, dict[str, str]],
    ) -> None:
        settings = self.settings
        drift = meter.drift(settings.ledger_requests, settings.ledger_share, away)
        if drift is not None:
            text = f"{drift.ledger} requests by the ledger, {drift.engine} by the engine"
            found["ledger_drift"][name] = text
        instance = self._instances.get(name)
        # Engines of other kinds never have the id; those with vLLM's metrics do.
        known = meter.echoed or (instance is not None and instance.block_tokens is not None)
        if meter.not_echoed >= settings.min_requests and known and any(each.echoed for each in engines.values()):
            text = f"its last {meter.not_echoed} answers do not have the id of x-request-id"
            found["engine_headers"][name] = text

        pairs = self._ledger.account(name).pairs
        ordered = instance is not None and instance.settings.priority_scheduling  # else they are old
        if ordered and pairs.total >= settings.min_requests and pairs.kept < _ORDERED_SHARE * pairs.total:
            text = f"{pairs.broken:.0f} of {pairs.total:.0f} prompts that were to be overtaken were not"
            found["priority_scheduling"][name] = text

    def _of_events(self, engines: Mapping[str, EngineMeter], found: dict[str, dict[str, str]], now_s: float) -> None:
        for name, stream in self._events.streams.items():
            meter = engines.get(name)
            if meter is None or name in found["prefix_cache"]:  # without a cache there are no events
                continue
            meter.saw_batches(stream.counters.batches, now_s)
            silent_s = now_s - meter.unreported_since_s
            if meter.unreported >= _MIN_SILENT and silent_s >= self.settings.events_silent_s:
                text = f"no events for {silent_s:.0f} s, in which it computed {meter.unreported} prompts"
                found["kv_events"][name] = text
            elif (reason := self._exact.reason(name)) not in _TRANSIENT:
                condition = _OWN_CONDITION.get(reason, "kv_events")
                found[condition][name] = f"its events are not used: {reason}"

    def _of_fleet(self, headers: SessionHeaders, found: dict[str, dict[str, str]]) -> None:
        sizes = {each.name: each.block_tokens for each in self._instances if each.block_tokens is not None}
        most = Counter(sizes.values()).most_common(1)
        found["block_size"] |= {
            name: f"blocks of {size} tokens, others of {most[0][0]}"
            for name, size in sizes.items()
            if size != most[0][0]
        }
        found["context_length"] |= self._short_contexts()
        found["data_parallel"] |= {
            each.name: text for each in self._instances if each.up and (text := each.ranks_problem)
        }
        hashes, wanted = self._exact.engine_hashes, self.settings.equal_hash_seeds
        groups = hashes.groups()
        if len(groups) > 1 and (wanted == "always" or (wanted == "auto" and hashes.agreed)):
            for group in groups[1:]:
                for name in group:
                    found["hash_seed"][name] = f"its block hashes differ from those of {len(groups[0])} other(s)"
        if headers.lost(self.settings.min_requests):
            found["session_headers"][FLEET] = (
                f"the last {headers.unnamed} requests have no session id, and {headers.continued} of them continue "
                "conversations that had one"
            )

    def _short_contexts(self) -> dict[str, str]:
        """Instances that refuse prompts of a model which another one accepts; the first such model of each."""
        lengths = {each.name: each.context_lengths for each in self._instances if each.up}
        longest: dict[str, int] = {}
        for of_one in lengths.values():
            for model, tokens in of_one.items():
                longest[model] = max(tokens, longest.get(model, 0))
        return {
            name: f"at most {tokens} tokens for {clip(model)}, others {longest[model]}"
            for name, of_one in lengths.items()
            for model, tokens in sorted(of_one.items(), reverse=True)
            if tokens < longest[model]
        }

    def _latch(self, found: dict[str, dict[str, str]], now_s: float) -> None:
        raise_s, clear_s = self.settings.raise_s, self.settings.clear_s
        for condition, texts in found.items():
            for key in texts:
                if (condition, key) not in self._latches:
                    self._latches[condition, key] = Latch()
        for (condition, key), latch in list(self._latches.items()):
            text = found[condition].get(key)
            if latch.update(text is not None, now_s, raise_s, clear_s):
                if text is not None or key not in self.failing[condition]:
                    self.failing[condition][key] = text or ""
            else:
                self.failing[condition].pop(key, None)
                if text is None:
                    del self._latches[condition, key]


def _no_hits(sums: EngineSums, engine_hits: tuple[float, float] | None) -> tuple[str, str]:
    """Finding for an instance whose answers report no cached tokens although prefixes repeat."""
    repeats = int(sums.repeats)
    if engine_hits is not None and not engine_hits[1]:
        return "prefix_cache", f"no cached tokens in {repeats} requests that repeat prefixes, by its counters too"
    return "cached_token_reports", f"its answers report no cached tokens in {repeats} requests that repeat prefixes"
