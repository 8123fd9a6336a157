"""``warmroute analyse pd-cost``: benefit of separating prefill from decode against the cost of moving the KV."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.analysis.output import AnalysisError, Figures, Json, Markdown, Sheet, folder, show, stop
from bench.analysis.words import giga, integers, milliseconds

if TYPE_CHECKING:
    from bench.analysis.pd_cost import CostRow, CostTable

TOKENS = "2048,8192,32768,65536,131072"


def pd_cost(
    profile: Annotated[str, typer.Option(help="Hardware profile: a name in configs/hardware or a YAML file.")] = "h20",
    prompt_tokens: Annotated[str, typer.Option(help="Uncached prompt lengths, tokens, comma-separated.")] = TOKENS,
    streams: Annotated[
        str, typer.Option(help="Decoding streams on the instance freed of the prefill, comma-separated.")
    ] = "8",
    transport: Annotated[
        str | None, typer.Option(help="KV transport of the profile. Default: its default.", show_default=False)
    ] = None,
    single_decode_s: Annotated[
        float, typer.Option(help="Decode time of one request for the published, wrong account, seconds (0.05-0.2).")
    ] = 0.2,
    figures: Figures = None,
    as_json: Json = False,
    as_markdown: Markdown = False,
) -> None:
    """Cost against benefit of PD separation: transfer time against stall avoided.

    Benefit = D x T_prefill x (1 - TPOT before / TPOT during), summed over the streams that a co-located prefill would
    stall. Measured points are used where the profile has them, else its fitted model (marked). The axis is phase
    isolation only: room for the KV on D (`analyse kv-wall`), queues on P and P's own decodes are not included.
    """
    from bench.analysis.pd_cost import cost_table
    from sim.hardware import ProfileError, load_profile
    from sim.points import load_points

    if not single_decode_s > 0:
        stop("--single-decode-s must be above 0")
    lengths, counts = integers(prompt_tokens, "--prompt-tokens", least=2), integers(streams, "--streams", least=1)
    try:
        chosen = load_profile(profile)
        beside = _points_path(profile)
        found = cost_table(
            chosen,
            load_points(beside) if beside.is_file() else None,
            tokens=lengths,
            streams=counts,
            transport=transport,
            single_decode_s=single_decode_s,
        )
    except (ProfileError, AnalysisError) as error:
        stop(error)
    if figures is not None:
        _draw(found, folder(figures))
    show(found, _sheets(found), as_json=as_json, as_markdown=as_markdown)


def _points_path(profile: str) -> Path:
    """The file of measured points beside a profile."""
    from warmroute_yaml import hardware_file

    path = hardware_file(profile)
    return path.with_name(f"{path.stem}_points.yaml")


def _sheets(found: CostTable) -> list[Sheet]:
    return [
        Sheet(
            f"{found.profile}, {found.transport}: benefit and cost of taking one prefill off a decoding instance",
            (
                "prompt",
                "D",
                "KV GiB",
                "T_prefill",
                "TPOT before",
                "TPOT during",
                "benefit",
                "transfer idle",
                "transfer loaded",
                "gain idle",
                "gain loaded",
                "pays from D",
                "pays",
            ),
            [_main(row) for row in found.rows],
            notes=[
                "Benefit: D x T_prefill x (1 - before / during), in stream-seconds; gain: benefit over transfer; "
                "loaded: D streams decoding on both sides. Times marked * are the profile's fitted model, the others "
                "measured points.",
                f"Source: {found.source}.",
            ],
        ),
        Sheet(
            f"The incorrect model: benefit capped at one request's decode, {milliseconds(found.single_decode_s)}",
            (
                "prompt",
                "D",
                "summed",
                "one stream's stall",
                "capped",
                "understated",
                "transfer idle",
                "would pay",
                "pays",
            ),
            [_wrong(row) for row in found.rows],
            notes=["The stall affects every stream in flight; the decode time of one request does not bound it."],
        ),
        Sheet(
            "Transfer time: the profile's table against the formula that the routing policies use",
            ("prompt", "D", "table idle", "formula idle", "table loaded", "formula loaded"),
            [
                (
                    f"{row.prompt_tokens:,}",
                    str(row.streams),
                    milliseconds(row.transfer_idle_s),
                    "–" if row.formula_idle_s is None else milliseconds(row.formula_idle_s),
                    milliseconds(row.transfer_loaded_s),
                    "–" if row.formula_loaded_s is None else milliseconds(row.formula_loaded_s),
                )
                for row in found.rows
            ],
            notes=["The formula covers a whole D leg up to its first token, the table the transfer alone."],
        ),
    ]


def _main(row: CostRow) -> list[str]:
    mark = "" if row.measured else "*"
    return [
        f"{row.prompt_tokens:,}",
        str(row.streams),
        giga(row.kv_bytes),
        milliseconds(row.prefill_s) + mark,
        milliseconds(row.tpot_base_s) + mark,
        milliseconds(row.tpot_during_s) + mark,
        f"{row.benefit_stream_s:,.2f} s",
        milliseconds(row.transfer_idle_s),
        milliseconds(row.transfer_loaded_s),
        f"{row.gain_idle:,.1f}x",
        f"{row.gain_loaded:,.1f}x",
        str(row.break_even_streams) if row.break_even_streams else "never",
        "yes" if row.pays else "no",
    ]


def _wrong(row: CostRow) -> list[str]:
    return [
        f"{row.prompt_tokens:,}",
        str(row.streams),
        f"{row.benefit_stream_s:,.2f} s",
        f"{row.stall_per_stream_s:,.2f} s",
        milliseconds(row.capped_benefit_s),
        f"{row.understated:,.0f}x",
        milliseconds(row.transfer_idle_s),
        "yes" if row.pays_if_capped else "no",
        "yes" if row.pays else "no",
    ]


def _draw(found: CostTable, to: Path) -> None:
    from bench.analysis.figures import Line, lines

    counts = list(dict.fromkeys(row.streams for row in found.rows))
    prompts = [row.prompt_tokens for row in found.rows if row.streams == counts[0]]
    curves = [
        Line(f"benefit, D = {count}", prompts, [row.benefit_stream_s for row in found.rows if row.streams == count])
        for count in counts
    ]
    first = [row for row in found.rows if row.streams == counts[0]]
    curves += [
        Line("transfer, idle", prompts, [row.transfer_idle_s for row in first]),
        Line("transfer, loaded", prompts, [row.transfer_loaded_s for row in first]),
        Line("benefit, incorrect model", prompts, [row.capped_benefit_s for row in first]),
    ]
    lines(
        to / f"pd_cost_{found.profile}_{found.transport}.svg",
        curves,
        x="prompt tokens",
        y="seconds (benefit: stream-seconds)",
        title=f"{found.profile}, {found.transport}",
        log_x=True,
        log_y=True,
    )
