"""Runs drawn from a known model, to test the comparison against the truth: sessions, runs and requests differ.

On the scale of logarithms, a time of request q of session s in run r of an arm is

    work(s) + work(q) + effect + effect(s) + noise(r) + noise(r, s) + noise(r, q)

where ``work`` belongs to the trace and is the same in every run. The true change of every quantile is exp(effect) - 1
where the effect does not differ between sessions. No recording is used.
"""

from __future__ import annotations

import msgspec
import numpy as np

from replayer.records.runs import RequestRecord, Run, RunEnd, RunHeader


class SyntheticTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters that all runs share. Standard deviations are of logarithms."""

    sessions: int = 80
    mean_turns: float = 4.0
    """Mean of a geometric distribution, so a few sessions are long."""
    session_sigma: float = 0.6
    request_sigma: float = 0.6
    seed: int = 0


class SyntheticNoise(msgspec.Struct, frozen=True, kw_only=True):
    """Differences between replicates. Standard deviations are of logarithms."""

    run_sigma: float = 0.03
    """Noise common to all requests of a run."""
    session_sigma: float = 0.1
    """Noise common to all requests of one session in a run."""
    request_sigma: float = 0.1
    fail_share: float = 0.0
    """Share of requests that fail, each independently."""


class SyntheticWork:
    """The part of every time that belongs to the trace, drawn once.

    Args:
        trace: its parameters.
    """

    def __init__(self, trace: SyntheticTrace) -> None:
        draw = np.random.default_rng([trace.seed, 0])
        turns = draw.geometric(1 / trace.mean_turns, size=trace.sessions)
        self.session_of = np.repeat(np.arange(trace.sessions), turns)
        self.turn = np.concatenate([np.arange(1, count + 1) for count in turns])
        self.requests = len(self.session_of)
        size = (3, self.requests)
        self.work = (
            draw.normal(0, trace.session_sigma, size=(3, trace.sessions))[:, self.session_of]
            + draw.normal(0, trace.request_sigma, size=size)
            + np.log([[0.5], [0.02], [2.0]])
        )
        """Shape (3, N): logarithms of TTFT, TPOT and the rest of E2E, in seconds."""
        arrivals = np.sort(draw.uniform(0, 2.0 * trace.sessions, size=trace.sessions))
        self.planned_s = arrivals[self.session_of] + 5.0 * (self.turn - 1)
        self.sessions = trace.sessions

    def run(
        self,
        label: str,
        noise: SyntheticNoise,
        seed: int,
        *,
        effect: tuple[float, float, float] = (0.0, 0.0, 0.0),
        effect_sigma: float = 0.0,
        effect_seed: int = 0,
    ) -> Run:
        """One run.

        Args:
            label: of the run.
            noise: parameters of the noise that this run adds.
            seed: of that noise.
            effect: change of TTFT, TPOT and the rest of E2E as a fraction: 0.05 is 5 % slower.
            effect_sigma: standard deviation of the effect between sessions (of logarithms).
            effect_seed: of that difference; the same for all runs of an arm.
        """
        draw = np.random.default_rng([seed, 1])
        shape = (3, self.sessions)
        logs = self.work + draw.normal(0, noise.run_sigma)
        logs = logs + draw.normal(0, noise.session_sigma, size=shape)[:, self.session_of]
        logs += draw.normal(0, noise.request_sigma, size=self.work.shape)
        logs += np.log1p(np.array(effect))[:, None]
        if effect_sigma:
            own = np.random.default_rng([effect_seed, 2]).normal(0, effect_sigma, size=self.sessions)
            logs += own[self.session_of]
        ttft, tpot, rest = np.exp(logs)
        ok = draw.random(self.requests) >= noise.fail_share
        records = [self._record(index, *times) for index, times in enumerate(zip(ttft, tpot, rest, ok, strict=True))]
        header = RunHeader(label=label, trace="synthetic", trace_sha256="5e" * 32, seed=seed)
        return Run(header, records, RunEnd(finished_unix_s=0.0, requests=len(records), ok=int(ok.sum())))

    def _record(self, index: int, ttft: float, tpot: float, rest: float, ok: bool) -> RequestRecord:
        planned, turn = float(self.planned_s[index]), int(self.turn[index])
        prompt = 1000 * turn
        e2e = float(ttft + rest)
        return RequestRecord(
            request_id=f"r{index}",
            session_id=f"s{self.session_of[index]:05d}",
            turn=turn,
            chat_id=index,
            trace_timestamp_s=planned,
            scheduled_s=planned,
            sent_s=planned,
            first_token_s=planned + float(ttft),
            finished_s=planned + e2e,
            ttft_s=float(ttft) if ok else None,
            tpot_s=float(tpot) if ok else None,
            e2e_s=e2e if ok else None,
            input_length=prompt,
            output_length=100,
            prompt_tokens=prompt if ok else None,
            completion_tokens=100 if ok else None,
            cached_tokens=prompt - 1000 if ok else None,
            ok=bool(ok),
            error=None if ok else "ReadTimeout",
        )
