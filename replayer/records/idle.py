"""Time that one request would take on an idle instance: arithmetic on an engine's step costs.

The same formula as the simulator's (`sim.core.timing`): a front end, prefill in steps of at most ``step_tokens``
tokens, and one step for each further token. Without measurement on the fleet itself it is a reference, not a fact.
"""

from __future__ import annotations

import msgspec

H200_SOURCE = "configs/hardware/h200.yaml: vLLM 0.20.2 with Qwen3-Coder-30B-A3B on one H200"


class IdleCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of one request alone on one instance, in seconds.

    The defaults are those of the H200 profile; a simulated run has its own profile's. A replay cannot know its
    engines' costs and uses the defaults.
    """

    source: str = H200_SOURCE
    request_s: float = 0.029346
    """Front end, for each request."""
    prompt_token_s: float = 9.9108e-07
    """Front end, for each prompt token, cached ones included."""
    prefill_step_s: float = 0.015207
    prefill_floor_s: float = 0.048387
    """The shortest prefill step."""
    new_token_s: float = 8.4845e-06
    """For each prompt token that is computed."""
    attention_s: float = 1.4364e-09
    """For each pair of a computed token and a token before it."""
    step_tokens: int = 8192
    """Most prompt tokens of a step."""
    decode_s: float = 0.0085828 + 0.013943 * (1 - 0.9375)
    """One output token after the first."""
    decode_context_s: float = 1.2398e-08
    """The same, for each token of context."""

    def turn_s(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> float:
        """Seconds from sending to the last token on an idle instance that has ``cached_tokens`` of the prompt cached.

        Tokens are those of the plan; at least one output token is counted.
        """
        new = max(prompt_tokens - cached_tokens, 1)
        rest = (new - 1) // self.step_tokens * self.step_tokens
        """Tokens of full steps; the last step has what is left."""
        full_s = rest // self.step_tokens * self.prefill_step_s + self._chunk_s(rest, cached_tokens)
        last_s = self.prefill_step_s + self._chunk_s(new - rest, cached_tokens + rest)
        further = max(output_tokens, 1) - 1
        context = further * prompt_tokens + further * (further + 1) / 2
        return (
            self.request_s
            + self.prompt_token_s * prompt_tokens
            + full_s
            + max(last_s, self.prefill_floor_s)
            + self.decode_s * further
            + self.decode_context_s * context
        )

    def _chunk_s(self, tokens: int, context_tokens: int) -> float:
        return tokens * (self.new_token_s + self.attention_s * (context_tokens + tokens / 2))
