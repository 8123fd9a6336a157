"""Reads the engines' lists of models: with every probe, and at once when an engine reports that it lacks a model."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable

import httpx
import msgspec

from proxy.clip import clip
from proxy.errors import AttemptFailedError, RequestError
from proxy.fleet.instances import Instance, Instances
from proxy.fleet.models import ModelList, NoModelListError
from proxy.fleet.reachability import status_diagnosis

log = logging.getLogger("warmroute.health")

_SPACING_S = 1.0
"""Shortest time between two refreshes of one engine's list: an engine may list a model and answer 404 for it."""
_MOST_BYTES = 64 * 1024
"""Longest error answer that is examined."""
_NEUTRAL = frozenset({401, 403, 408, 429})
"""Statuses that, like 5xx, say nothing about the models."""
_KEY_REFUSED = frozenset({401, 403})
_MISSING = re.compile(r"\bmodel\b.*\b(does not exist|not found)", re.IGNORECASE | re.DOTALL)
"""vLLM: "The model `x` does not exist."; others say "not found"."""


class AnotherServerError(Exception):
    """A server that is not the engine that was there before, or none at all, answered."""


def is_model_missing(content: bytes) -> bool:
    """True if the body of a 404 states that the engine does not serve the model, and not that a path is unknown."""
    if len(content) > _MOST_BYTES:
        return False
    try:
        answer = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    # vLLM before 0.10 has the fields at the top level.
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    if not isinstance(error, dict):
        return False
    message = error.get("message")
    return error.get("code") == "model_not_found" or (isinstance(message, str) and bool(_MISSING.search(message)))


class ModelLists:
    """Reads the lists. Owns the refreshes in progress, at most one per engine; ``close`` ends them.

    Args:
        instances: the fleet.
        get: GET of a path of an engine, bounded in time and size.
    """

    def __init__(self, instances: Instances, get: Callable[[Instance, str], Awaitable[httpx.Response]]) -> None:
        self._instances = instances
        self._get = get
        self._refreshing: dict[Instance, asyncio.Task[None]] = {}
        self.on_replaced: Callable[[Instance], None] = _ignore_replaced
        """Called when an engine serves none of the base models it served before: it is another engine."""

    async def read(self, instance: Instance) -> None:
        """Read one engine's list, for all its ranks. One that answers with an error and never had a list is left as is.

        Raises:
            AnotherServerError: the answer is no list of models, or an error although it had a list before.
            httpx.HTTPError: no answer.
        """
        answer = await self._get(instance, "/v1/models")
        ranks = self._instances.ranks(instance)
        if answer.status_code != 200:
            for each in ranks:
                _refused(each, answer.status_code)
            return
        try:
            models = ModelList.read(answer.content)
        except NoModelListError as error:
            raise AnotherServerError(f"GET /v1/models answered {error}: another server on its port?") from error
        for each in ranks:
            self._listed(each, models)

    def _listed(self, instance: Instance, models: ModelList) -> None:
        if not self._instances.contains(instance):
            return
        known, instance.list_refused = instance.models, None
        if instance.base_models and instance.base_models != models.base:
            before, now = (_shown(names) for names in (instance.base_models, models.base))
            log.warning("%s serves %s; before: %s", instance.name, now, before)
        if known is not None and known.base and models.base and known.base.isdisjoint(models.base):
            self.on_replaced(instance)  # another engine
        self._instances.listed(instance, models)

    def not_found(self, instance: Instance, model: str, content: bytes) -> None:
        """Examine an engine's 404. If it lacks the model, the name is taken from its list, which is read again.

        Raises:
            AttemptFailedError: it lacks the model: another engine may be tried, which is not counted as a failure.
        """
        if not is_model_missing(content):
            return
        # Without a refresh that corrects it, requests could take a model from everybody.
        if self.refresh(instance):
            self._instances.lacks(instance, model)
        text = content[:200].decode("utf-8", "replace")
        refusal = RequestError(
            404,
            f"{instance.name} does not serve the model: {text}",
            kind="not_found_error",
            code="model_not_found",
            param="model",
        )
        raise AttemptFailedError(instance.name, f"answered 404: {text}", seen=False, refusal=refusal)

    def refresh(self, instance: Instance) -> bool:
        """Start reading one engine's list now. False if that was done within the last second, and has ended."""
        now_s = time.monotonic()
        if instance in self._refreshing:
            return True
        if now_s - instance.refreshed_s < _SPACING_S:
            return False
        instance.refreshed_s = now_s
        task = asyncio.create_task(self._refresh(instance), name=f"models of {instance.name}")
        self._refreshing[instance] = task
        task.add_done_callback(lambda _: self._refreshing.pop(instance, None))
        return True

    async def close(self) -> None:
        """Cancel the refreshes in progress."""
        tasks = list(self._refreshing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _refresh(self, instance: Instance) -> None:
        try:
            await self.read(instance)
        except (httpx.HTTPError, AnotherServerError) as error:
            log.debug("the models of %s could not be read: %s", instance.name, error)  # the next probe judges it


def _refused(instance: Instance, status: int) -> None:
    """Take an error in place of a list. Raises AnotherServerError: the engine had a list before."""
    if status in _KEY_REFUSED and instance.list_refused is None:
        instance.list_refused = status_diagnosis("/v1/models", status, instance.url)
        log.warning("%s does not list its models: %s", instance.name, instance.list_refused)
    if instance.models is not None and status not in _NEUTRAL and status < 500:
        raise AnotherServerError(f"GET /v1/models answered {status}: another server on its port?")


def _shown(names: frozenset[str]) -> str:
    return clip(", ".join(sorted(names))) or "no model"


def _ignore_replaced(_: Instance) -> None:
    """Default of ``on_replaced``."""
