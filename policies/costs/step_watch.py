"""Prefills that ran in the steps of each stream, counted from the first tokens of an instance's requests."""

from __future__ import annotations

from policies.costs.short_step import SHORT_TOKENS, BesideStream

_SAME_STEP_S = 0.01
"""First tokens within this time come from one step; a step with a prefill takes longer."""


class _Step:
    """A step with at least one prefill."""

    __slots__ = ("after", "at_s", "seconds", "tokens")

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s
        self.tokens = 0
        self.seconds = 0.0
        self.after: tuple[int, int, float] | None = None
        """The instance's sums after this step; None while it is the last one."""

    def added_to(self, sums: tuple[int, int, float]) -> tuple[int, int, float]:
        """Sums of short steps, long steps and their prefills' seconds, this step included."""
        short, long, prefill_s = sums
        is_short = self.tokens <= SHORT_TOKENS
        return (short + is_short, long + (not is_short), prefill_s + self.seconds)


class _Instance:
    """Steps and streams of one instance."""

    __slots__ = ("at_s", "last", "stream_s", "streams", "sums")

    def __init__(self, now_s: float) -> None:
        self.streams = 0
        self.stream_s = 0.0
        """Time integral of the number of streams until ``at_s``."""
        self.at_s = now_s
        self.sums = (0, 0, 0.0)
        """Of all steps with a prefill but the last one."""
        self.last: _Step | None = None

    def passed(self, now_s: float) -> None:
        """Count the streams until now."""
        self.stream_s += self.streams * (now_s - self.at_s)
        self.at_s = now_s

    def stepped(self, new_tokens: int, seconds: float, now_s: float) -> None:
        """Count a prefill that has ended."""
        step = self.last
        if step is None or now_s - step.at_s > _SAME_STEP_S:
            if step is not None:
                self.sums = step.after = step.added_to(self.sums)
            step = self.last = _Step(now_s)
        step.tokens += new_tokens
        step.seconds += seconds


class WatchedStream:
    """An answer that is being generated."""

    __slots__ = ("began_s", "instance", "step", "stream_s")

    def __init__(self, instance: _Instance, now_s: float) -> None:
        self.instance = instance
        self.began_s = now_s
        self.stream_s = instance.stream_s
        self.step = instance.last
        """The last step with a prefill when it began: its own, unless it was prefilled elsewhere."""


class StepWatch:
    """Streams in progress by instance. Single writer; times are monotonic or virtual."""

    def __init__(self) -> None:
        self._instances: dict[str, _Instance] = {}

    def prefilled(self, instance: str, new_tokens: int, seconds: float, now_s: float) -> None:
        """A prefill of so many tokens, ``seconds`` long by the formula, has ended on an instance."""
        self._of(instance, now_s).stepped(new_tokens, seconds, now_s)

    def began(self, instance: str, now_s: float) -> WatchedStream:
        """The first token of a stream has come; its prefill, if it ran there, is noted before."""
        found = self._of(instance, now_s)
        found.passed(now_s)
        found.streams += 1
        return WatchedStream(found, now_s)

    def ended(self, stream: WatchedStream, now_s: float | None) -> None:
        """The stream has ended, complete or not; call it once. ``now_s``: None for the time of the last event there."""
        stream.instance.passed(stream.instance.at_s if now_s is None else now_s)
        stream.instance.streams -= 1

    def beside(self, stream: WatchedStream, tokens: int, now_s: float) -> BesideStream:
        """Steps of a stream whose last token, the ``tokens``-th after its first, has come just now."""
        found, seconds = stream.instance, now_s - stream.began_s
        found.passed(now_s)
        mean_streams = (found.stream_s - stream.stream_s) / seconds if seconds > 0 else 0.0
        step, last = stream.step, found.last
        short, long, prefill_s = 0, 0, 0.0
        if last is not None and step is not last:
            before = (0, 0, 0.0) if step is None else step.after or found.sums
            now = last.added_to(found.sums)
            short, long, prefill_s = now[0] - before[0], now[1] - before[1], now[2] - before[2]
        return BesideStream(seconds, tokens, tokens * mean_streams, short, long, prefill_s)

    def forget(self, instance: str) -> None:
        """The instance left the fleet, or restarted."""
        self._instances.pop(instance, None)

    def _of(self, instance: str, now_s: float) -> _Instance:
        found = self._instances.get(instance)
        if found is None:
            found = self._instances[instance] = _Instance(now_s)
        return found
