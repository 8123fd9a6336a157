"""The figures that docs/head-to-head.md and the README state for chat are those of the kept records."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.routers.records import read_records
from replayer.records.classes import PlannedClass, planned_class

_DOCS = Path(__file__).parents[3] / "docs"
_PAGE = (_DOCS / "head-to-head.md").read_text(encoding="utf-8")
_README = (_DOCS.parent / "README.md").read_text(encoding="utf-8")
_FIGURES = " ".join((_DOCS / "figures.md").read_text(encoding="utf-8").split())


class Chat:
    """The judged requests of each arm."""

    def __init__(self, folder: str, judged_from_s: float) -> None:
        self.answered = 0
        self.run_means: dict[str, list[float]] = {}
        self._e2e: dict[str, list[float]] = {}
        self._ttft: dict[str, list[float]] = {}
        self._long: dict[str, list[float]] = {}
        for run in read_records(_DOCS / "results" / folder).values():
            records = [each.record() for each in run.requests]
            self.answered += sum(each.ok for each in records)
            judged = [each for each in records if each.trace_timestamp_s >= judged_from_s]
            heavy = [each for each in judged if planned_class(each) is PlannedClass.HEAVY]
            assert len(heavy) == 23
            self._e2e.setdefault(run.label, []).extend(each.e2e_scheduled_s or 0.0 for each in judged)
            self._ttft.setdefault(run.label, []).extend(each.ttft_scheduled_s or 0.0 for each in judged)
            self._long.setdefault(run.label, []).extend(each.ttft_scheduled_s or 0.0 for each in heavy)
            self.run_means.setdefault(run.label, []).append(float(np.mean([each.e2e_scheduled_s for each in judged])))
        self.mean = {label: f"{np.mean(times):.1f}" for label, times in self._e2e.items()}
        """Mean E2E."""
        self.p90 = {label: f"{np.quantile(times, 0.9):.1f}" for label, times in self._ttft.items()}
        """p90 of TTFT."""
        self.waits = {label: f"{np.mean(times):.1f}" for label, times in self._long.items()}
        """Mean TTFT of the longest prompts."""


WARM, VLLM, EVEN, SGLANG, LMETRIC, STICKY = (
    "warm",
    "vllm:cache_aware",
    "vllm:round_robin",
    "sglang:cache_aware",
    "lmetric",
    "session_sticky",
)


def test_what_the_page_and_the_readme_say_of_chat() -> None:
    page = " ".join(_PAGE.partition("## Chat on two H100s")[2].partition("<!-- chat: begin -->")[0].split())
    chat = Chat("routers-chat-h100-2x", 32.3)
    mean, p90, waits = chat.mean, chat.p90, chat.waits
    assert min(chat.run_means[LMETRIC]) > max(chat.run_means[WARM])
    assert waits[LMETRIC] == waits[VLLM]
    for said in (
        f"mean E2E is {mean[WARM]} s, vLLM Router's `cache_aware` takes {mean[VLLM]} s and its `round_robin` "
        f"{mean[EVEN]} s, SGLang's gateway {mean[SGLANG]} s; TTFT p90 is {p90[WARM]}, {p90[VLLM]}, {p90[EVEN]} and "
        f"{p90[SGLANG]} s",
        f"(mean E2E {mean[LMETRIC]} s, above `warm` in every run)",
        f"TTFT p90 is {p90[LMETRIC]} s (",
        f"wait {waits[WARM]} s for their first token, {waits[LMETRIC]} s with `lmetric` and vLLM Router's "
        f"`cache_aware`, {waits[SGLANG]} s with SGLang's gateway, {waits[EVEN]} s with `round_robin`",
        f"All {chat.answered:,} requests were answered",
    ):
        assert said in page, said
    assert (
        f"| mean E2E of chat, eight vLLM instances on two H100s | `warm` {mean[WARM]} s | vLLM Router `cache_aware` "
        f"{mean[VLLM]} s, `round_robin` {mean[EVEN]} s · SGLang gateway `cache_aware` {mean[SGLANG]} s · `lmetric` "
        f"{mean[LMETRIC]} s |" in _README
    )


def test_what_the_page_and_the_readme_say_of_chat_as_token_ids() -> None:
    section = _PAGE.partition("### As token ids, on one H200")[2].partition("<!-- chat, token ids: begin -->")[0]
    page = " ".join(section.split())
    chat = Chat("routers-chat-h200", 26.7)
    mean, p90, waits = chat.mean, chat.p90, chat.waits
    for other in (STICKY, VLLM, EVEN, LMETRIC):
        assert min(chat.run_means[other]) > max(chat.run_means[WARM])
    for said in (
        f"TTFT p90 is {p90[WARM]} s, with `session_sticky` {p90[STICKY]}, with vLLM Router's `cache_aware` {p90[VLLM]} "
        f"and its `round_robin` {p90[EVEN]} s; mean E2E {mean[WARM]}, {mean[STICKY]}, {mean[VLLM]} and {mean[EVEN]} s, "
        "above `warm` in every run",
        f"`lmetric` is the closest again, {p90[LMETRIC]} and {mean[LMETRIC]} s",
        f"wait {waits[WARM]} s for their first token, {waits[STICKY]} s with `session_sticky`, {waits[LMETRIC]} s with "
        f"`lmetric`, {waits[VLLM]} and {waits[EVEN]} s with vLLM Router",
        f"All {chat.answered:,} requests were answered",
    ):
        assert said in page, said
    assert (
        f"{mean[WARM]} s beside {mean[STICKY]} s of `session_sticky`, {mean[VLLM]} and {mean[EVEN]} s of vLLM Router"
        in _FIGURES
    )
