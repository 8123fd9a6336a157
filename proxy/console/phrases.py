"""Values of a row's closed sets as parts of sentences."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from policies.admission.base import AdmissionReason
from policies.row import RequestOutcome
from policies.types import OffloadReason, Reason

OUTCOMES: Mapping[str, str] = MappingProxyType(
    {
        RequestOutcome.OK: "It was answered.",
        RequestOutcome.REJECTED: "The proxy rejected it, because of what the client sent.",
        RequestOutcome.ENGINE_REFUSED: "The engine refused it, and its answer was passed on.",
        RequestOutcome.CLIENT_GONE: "The client closed its connection before the answer was complete.",
        RequestOutcome.NO_INSTANCE: "No instance could be sent requests.",
        RequestOutcome.QUEUE_FULL: "The fleet was at its limits, and the queue was full (limits.queue_size).",
        RequestOutcome.QUEUE_TIMEOUT: "It waited in the queue for as long as permitted (limits.queue_timeout_s).",
        RequestOutcome.WAIT_TOO_LONG: "Its expected wait in the line was above admission.reject_above_s.",
        RequestOutcome.UPSTREAM_ERROR: "Every attempt failed, and none was left.",
        RequestOutcome.UPSTREAM_TIMEOUT: "The engine did not answer in time.",
        RequestOutcome.POISON_REQUEST: "Two engines died while serving it, so it was not sent to a third.",
        RequestOutcome.STREAM_BROKEN: "The engine's stream broke after its first byte had been sent to the client.",
        RequestOutcome.SHUTDOWN: "The proxy shut down before it ended.",
        RequestOutcome.INTERNAL_ERROR: "The proxy failed; its log has the error.",
    }
)

REASONS: Mapping[str, str] = MappingProxyType(
    {
        Reason.ONLY_CANDIDATE: "it was the only instance that could be chosen",
        Reason.NEXT_IN_TURN: "it was the next in turn",
        Reason.DRAWN: "it was drawn at random",
        Reason.LEAST_LOADED: "it had the least load",
        Reason.LOWEST_SCORE: "it had the lowest score",
        Reason.HOTSPOT_AVOIDED: "the instances that hold this prefix were a hotspot and were left out",
        Reason.SESSION_PINNED: "the session's turns before were served there",
        Reason.SESSION_PLACED: "the session was new and was placed there",
        Reason.SESSION_OVERLOADED: "the session's own instance was overloaded",
        Reason.SESSION_INSTANCE_GONE: "the session's own instance could not be chosen any more",
        Reason.SESSION_MIGRATED: "the session's KV was pulled from its home, which was overloaded",
        Reason.AFFINITY: "most of the prompt was predicted to be in its cache",
        Reason.AFFINITY_OVERLOADED: "the instance with the longest cached prefix was overloaded",
    }
)

OFFLOADS: Mapping[str, str] = MappingProxyType(
    {
        OffloadReason.PLANNER_NEVER: "the planner never hands off",
        OffloadReason.PLANNER_FAILED: "the planner failed; GET /stats has the error",
        OffloadReason.REQUEST_SHAPE: "a hand-off cannot carry it: several prompts or choices, a beam "
        "search, an echo or log probabilities of its prompt, a body over 8 MiB, or the rest of a broken stream",
        OffloadReason.BELOW_THRESHOLD: "its new tokens were below the planner's threshold",
        OffloadReason.ROLE_FORBIDS: "the roles of the instances do not permit one",
        OffloadReason.NO_PREFILL_CANDIDATE: "no other instance could prefill it",
        OffloadReason.NO_SPECIALIST: "no instance was designated for long prefills",
        OffloadReason.CAP_REACHED: "as many hand-offs as permitted were in flight",
        OffloadReason.PAIR_BROKEN: "hand-offs between these instances failed lately",
        OffloadReason.NO_ROOM_ON_D: "its KV would not have fit on the instance that decodes",
        OffloadReason.NOTHING_TO_PROTECT: "no stream was decoding that its prefill would have delayed",
        OffloadReason.DOES_NOT_PAY: "it would have taken longer than a prefill in place",
        OffloadReason.UNSURE: "its expected gain was within the usual error of the estimate",
        OffloadReason.FELL_BACK_P_TIMEOUT: "the prefill leg took too long",
        OffloadReason.FELL_BACK_P_ERROR: "the prefill leg failed",
        OffloadReason.FELL_BACK_P_IDENTITY: "the prefilling engine was not the one that was expected",
        OffloadReason.FELL_BACK_P_GONE: "the prefilling instance left the fleet while its KV was pulled",
        OffloadReason.FELL_BACK_D_TIMEOUT: "pulling the KV took too long",
        OffloadReason.FELL_BACK_D_ERROR: "pulling the KV failed",
    }
)
"""Reason for which a request was not handed off, or for which that failed."""

ADMISSIONS: Mapping[str, str] = MappingProxyType(
    {
        AdmissionReason.NEVER_HOLDS: "the admission rule never holds requests",
        AdmissionReason.RESIDENT: "its session was in flight or had just been, with its context still in a pool",
        AdmissionReason.IDLE_FLEET: "an engine had no request and few waited for a first token, so it would have idled",
        AdmissionReason.POOLS_UNKNOWN: "no engine had reported the size of its KV pool",
        AdmissionReason.ROOM: "the KV pools had room for its context",
        AdmissionReason.BELOW_CAP: "fewer sessions than permitted were in flight or kept",
        AdmissionReason.HELD_LONG_ENOUGH: "the bound on holding was reached (admission.max_hold_s)",
        AdmissionReason.LINE_FULL: "as many requests as permitted were held (admission.max_held)",
        AdmissionReason.RULE_FAILED: "the admission rule failed; GET /stats has the error",
        AdmissionReason.AT_CAP: "as many sessions as permitted were in flight or kept",
        AdmissionReason.WORKING_SET: "the contexts in use and its own exceeded the pools",
    }
)

RESUMES: Mapping[str, str] = MappingProxyType(
    {
        "resumed": "another engine continued it",
        "completed": "only its end was missing, which the proxy added",
        "shape": "it is no single text that can be continued",
        "logprobs": "it has log probabilities",
        "sampled": "it is sampled at random, so that another engine would generate another text",
        "tool_call": "a tool call was in progress",
        "unreadable": "its events could not be read",
        "too_long_to_repeat": "too much would have had to be generated again (resume.repeat_tokens)",
        "no_clean_position": "the text sent so far did not end with a complete character",
        "budget": "the retry budget was exhausted",
        "exhausted": "it had been resumed as often as permitted (resume.max_resumes)",
        "poison": "two engines had died while serving it",
        "no_instance": "there was no other healthy instance",
        "failed": "the other instance refused, or broke before its first byte",
        "diverged": "the other instance generated a different text",
    }
)
"""Result of resuming a broken stream."""

STAGES: Mapping[str, str] = MappingProxyType(
    {
        "parse": "until it was received and parsed",
        "held": "held by admission",
        "queued": "in the queue",
        "decide": "routing decision",
        "prefill_leg": "prefill on the other instance",
        "decode_leg_first_byte": "from there to the first byte of the instance that decodes",
        "first_byte": "until the first byte of the answer",
        "resume": "waiting for engines that continued the stream",
        "total": "until the end",
    }
)
"""Stages of ``stages_ms`` in the order of time."""

LEGS: Mapping[str, str] = MappingProxyType(
    {"prefill": "prefill leg", "transfer": "transfer of the KV", "first_token": "first token"}
)


def spoken(phrases: Mapping[str, str], value: object) -> str:
    """The phrase of a value; the value itself where none is known, as in rows of another version."""
    text = str(value)
    return phrases.get(text, text.replace("_", " "))
