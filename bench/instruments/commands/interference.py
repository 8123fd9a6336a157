"""``warmroute measure interference``: what a prefill does to the streams that decode on the same engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bench.analysis.output import Figures, Json, Markdown, folder, show
from bench.analysis.words import integers
from bench.instruments.commands import options

if TYPE_CHECKING:
    from bench.instruments.interference import InterferencePlan, InterferenceRow
    from bench.instruments.prompts import Prompts
    from bench.instruments.record import EngineNote
    from bench.instruments.targets import EngineAddress, Targets


def interference(
    fleet: options.FleetArgument = None,
    overrides: options.Overrides = None,
    urls: options.Urls = None,
    engine: Annotated[
        str | None, typer.Option(help="Engine to measure, by name. Default: the first.", show_default=False)
    ] = None,
    streams: options.Streams = "1,4,8,16",
    prefill_tokens: Annotated[
        str, typer.Option(help="Prompt lengths of the prefill, tokens, comma-separated.")
    ] = "2048,8192,32768,65536,131072",
    context_tokens: options.ContextTokens = 1_024,
    before_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each stream before the prefill.")] = 32,
    stream_tokens: Annotated[
        int, typer.Option(min=2, help="Output limit of a stream, tokens: more than it gets during the prefill.")
    ] = 8_192,
    repeats: options.Repeats = 3,
    model: options.Model = None,
    api_key_env: options.ApiKeyEnv = None,
    token_low: options.TokenLow = 1_000,
    token_high: options.TokenHigh = 100_000,
    timeout_s: options.TimeoutS = 600.0,
    seed: options.Seed = 0,
    hardware: options.Hardware = "",
    output: options.Output = None,
    figures: Figures = None,
    as_json: Json = False,
    as_markdown: Markdown = False,
) -> None:
    """Interference: time per output token of decoding streams before and during one prefill.

    Measures one idle engine, directly. For several chunk sizes, start the fleet with each
    (`--set vllm.max_num_batched_tokens=...`) and measure again.
    """
    from bench.instruments.interference import InterferencePlan, interference_sheet
    from bench.instruments.record import InstrumentRecord

    targets = options.chosen_targets(fleet, overrides, urls)
    plan = InterferencePlan(
        streams=tuple(integers(streams, "--streams", least=1)),
        prefill_tokens=tuple(integers(prefill_tokens, "--prefill-tokens", least=2)),
        repeats=repeats,
        context_tokens=context_tokens,
        before_tokens=before_tokens,
        stream_tokens=stream_tokens,
    )
    prompts = options.prompts_of(token_low, token_high, seed)
    record = InstrumentRecord(
        instrument="interference",
        hardware=hardware,
        fleet=targets.fleet,
        seed=seed,
        nonce=prompts.nonce,
        plan=plan,
    )
    record.engines, rows = options.measured(
        _measure(targets, engine, plan, prompts, model, options.api_key_from(api_key_env), timeout_s)
    )
    record.rows = rows
    options.written(output, record)
    if figures is not None:
        from bench.instruments.figures import draw_interference

        draw_interference(rows, folder(figures))
    show(record, [interference_sheet(rows)], as_json=as_json, as_markdown=as_markdown)


async def _measure(
    targets: Targets,
    name: str | None,
    plan: InterferencePlan,
    prompts: Prompts,
    model: str | None,
    api_key: str | None,
    timeout_s: float,
) -> tuple[list[EngineNote], list[InterferenceRow]]:
    from bench.instruments.engine import refuse_busy
    from bench.instruments.interference import measure_interference
    from bench.instruments.targets import notes_of, opened

    target: EngineAddress = targets.engines[0] if name is None else targets.named(name)
    async with opened((target,), model or targets.model, api_key, timeout_s) as engines:
        await refuse_busy(engines)
        notes = await notes_of(engines, targets)
        longest = await engines[0].max_model_len()
        options.refuse_longer("--prefill-tokens", max(plan.prefill_tokens), longest)
        plan.stream_tokens = options.fitting(plan.stream_tokens, plan.context_tokens, longest)
        return notes, await measure_interference(engines[0], plan, prompts, options.progress)
