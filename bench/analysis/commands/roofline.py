"""``warmroute analyse roofline``: FLOPs, bytes, ceilings and floors of a model on a GPU, against measured times."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.analysis.output import AnalysisError, Figures, Gpu, Json, Markdown, Model, Sheet, folder, show, stop
from bench.analysis.words import count, giga, integers, milliseconds

if TYPE_CHECKING:
    from bench.analysis.architecture import Architecture
    from bench.analysis.roofline import Machine, MeasuredTime, Precision, Roofline
    from sim.points import Points

CHUNKS = "64,512,2048,8192"
CONTEXTS = "0,32768,131072"
STREAMS = "1,8,32,64"


def roofline(
    model: Model = "qwen3-coder-30b-a3b",
    gpu: Gpu = "h200",
    gpus: Annotated[
        int, typer.Option(min=1, help="GPUs that share the model evenly; communication is not counted.")
    ] = 1,
    weight_bits: Annotated[
        int, typer.Option(help="Bits of a weight: 16, or 8 with the FP8 peak, also for attention.")
    ] = 16,
    kv_bits: Annotated[int, typer.Option(help="Bits of a value in the KV cache, 16 or 8.")] = 16,
    chunk_tokens: Annotated[str, typer.Option(help="Prefill chunks in tokens, comma-separated.")] = CHUNKS,
    context_tokens: Annotated[
        str, typer.Option(help="Tokens before a chunk and in each decoding stream, comma-separated.")
    ] = CONTEXTS,
    streams: Annotated[str, typer.Option(help="Numbers of decoding streams, comma-separated.")] = STREAMS,
    profile: Annotated[
        str,
        typer.Option(
            help="Measured points to compare with: h20, h200, a points file, none, or auto (the GPU's, if they fit)."
        ),
    ] = "auto",
    figures: Figures = None,
    as_json: Json = False,
    as_markdown: Markdown = False,
) -> None:
    """Prefill and decode roofline of a model on a GPU: floors of T_prefill and TPOT.

    The floor counts matrices, attention, weights and KV traffic at the data sheet's peaks; launches, activations and
    communication are free. Against a profile's measured points it gives the share of the peak that was reached: they
    are of Qwen3-Coder-30B-A3B on one GPU in 16 bits.
    """
    from bench.analysis.roofline import (
        Precision,
        Roofline,
        compute_bound_chunk,
        decode_step,
        machine,
        prefill_step,
        step_row,
    )
    from bench.analysis.sheets import load_gpu, load_model

    if weight_bits not in (8, 16) or kv_bits not in (8, 16):
        stop("--weight-bits and --kv-bits are 16 or 8")
    precision = Precision(weight_bits, kv_bits)
    before = integers(context_tokens, "--context-tokens", least=0)
    try:
        shape, sheet = load_model(model), load_gpu(gpu)
        on = machine(sheet, precision, gpus)
        points = _points(profile, shape.name, sheet.name, gpus, precision)
    except AnalysisError as error:
        stop(error)
    room = gpus * sheet.visible_bytes - shape.parameters * precision.weight_bytes
    room_tokens = room / shape.kv_bytes_per_token(precision.kv_bytes)
    steps = [
        step_row(
            "prefill chunk",
            new,
            context,
            prefill_step(shape, precision, new, context),
            on,
            fits=new + context <= room_tokens,
        )
        for new in integers(chunk_tokens, "--chunk-tokens", least=1)
        for context in before
    ]
    steps += [
        step_row(
            "decode step",
            width,
            context,
            decode_step(shape, precision, width, context),
            on,
            fits=width * (context + 1) <= room_tokens,
        )
        for width in integers(streams, "--streams", least=1)
        for context in before
        if context
    ]
    found = Roofline(
        model=shape.name,
        gpu=sheet.name,
        gpus=gpus,
        weight_bits=weight_bits,
        kv_bits=kv_bits,
        parameters=shape.parameters,
        active_parameters=shape.layer_parameters_per_token + shape.head_parameters,
        weight_bytes=shape.parameters * precision.weight_bytes,
        kv_bytes_per_token=shape.kv_bytes_per_token(precision.kv_bytes),
        layer_flops_per_token=shape.layer_flops_per_token(),
        peak_tflops=on.flops_per_s / 1e12,
        peak_tb_per_s=on.bytes_per_s / 1e12,
        ridge=on.ridge,
        chunk_tokens=points.max_num_batched_tokens if points else 8192,
        steps=steps,
        compute_bound_chunk=compute_bound_chunk(shape, precision, on),
        profile=points.source if points else None,
        measured=_against(points, shape, precision, on) if points else [],
    )
    if figures is not None:
        _draw(found, on, folder(figures))
    show(found, _sheets(found), as_json=as_json, as_markdown=as_markdown)


def _points(profile: str, model: str, gpu: str, gpus: int, precision: Precision) -> Points | None:
    from sim.hardware import ProfileError
    from sim.points import load_points, points_path
    from warmroute_yaml import HARDWARE_FOLDER

    if profile == "none":
        return None
    if profile == "auto":
        same = model == "qwen3-coder-30b-a3b" and gpus == 1 and precision == (16, 16)
        if not same or not (HARDWARE_FOLDER / f"{gpu}_points.yaml").is_file():
            return None
        profile = gpu
    try:
        return load_points(points_path(profile))
    except ProfileError as error:
        raise AnalysisError(f"--profile: {error}") from error


def _against(points: Points, model: Architecture, precision: Precision, on: Machine) -> list[MeasuredTime]:
    from bench.analysis.roofline import decode_step, measured, prefill_steps

    budget = points.max_num_batched_tokens
    found = [
        measured(
            "prefill",
            f"{each.new:,} new after {each.cached:,}",
            prefill_steps(model, precision, each.new, each.cached, budget),
            each.seconds,
            on,
        )
        for each in points.prefill
    ]
    found += [
        measured(
            f"prefill among {each.streams} decodes",
            f"{each.prefill:,} new",
            prefill_steps(model, precision, each.prefill, 0, budget),
            each.ttft_s,
            on,
        )
        for each in points.interference
        if not each.skip and not points.prefill
    ]
    found += [
        measured(
            "decode",
            f"{each.streams} x {each.context:,}",
            [decode_step(model, precision, each.streams, each.context)],
            each.seconds,
            on,
        )
        for each in points.decode
    ]
    return found


def _sheets(found: Roofline) -> list[Sheet]:
    gpus = f"{found.gpus} x " if found.gpus > 1 else ""
    limit = "none up to a million" if found.compute_bound_chunk is None else f"{found.compute_bound_chunk:,} tokens"
    sheets = [
        Sheet(
            f"{found.model} on {gpus}{found.gpu}, weights {found.weight_bits} bits, KV {found.kv_bits} bits",
            ("what", "value"),
            [
                ("parameters", count(found.parameters)),
                ("parameters used per token", count(found.active_parameters)),
                ("weights", f"{giga(found.weight_bytes)} GiB"),
                ("KV cache of a token", f"{found.kv_bytes_per_token:,.0f} B"),
                ("layers' FLOPs for a token, without attention", count(found.layer_flops_per_token)),
                ("peak arithmetic", f"{found.peak_tflops:,.0f} TFLOPS"),
                ("peak bandwidth", f"{found.peak_tb_per_s:g} TB/s"),
                ("ridge (FLOPs a byte)", f"{found.ridge:,.0f}"),
                ("arithmetic limits a prefill chunk from", limit),
            ],
        ),
        Sheet(
            "Steps",
            (
                "step",
                "tokens/streams",
                "context",
                "GFLOPs",
                "GB",
                "FLOPs/B",
                "limit",
                "ceiling TFLOPS",
                "floor",
                "fits",
            ),
            [
                (
                    row.kind,
                    f"{row.tokens:,}",
                    f"{row.context:,}",
                    f"{row.gflops:,.1f}",
                    f"{row.gbytes:,.2f}",
                    f"{row.intensity:,.1f}",
                    row.limit,
                    f"{row.tflops_ceiling:,.1f}",
                    milliseconds(row.floor_s),
                    "yes" if row.fits else "no",
                )
                for row in found.steps
            ],
            notes=["`fits`: weights and the KV of these tokens are within the memory that the driver reports."],
        ),
    ]
    if found.measured:
        sheets.append(
            Sheet(
                "Floor against measured",
                ("step", "point", "floor", "measured", "share of peak reached"),
                [
                    (
                        row.kind,
                        row.point,
                        milliseconds(row.floor_s),
                        milliseconds(row.measured_s),
                        f"{row.efficiency:.0%}",
                    )
                    for row in found.measured
                ],
                left=2,
                notes=[
                    f"Points: {found.profile}.",
                    f"Prefill in chunks of {found.chunk_tokens:,} tokens. Measured times to first token include the "
                    "engine's front end (HTTP, hashing, scheduling), which takes longer than computing a short prompt.",
                ],
            )
        )
    return sheets


def _draw(found: Roofline, on: Machine, to: Path) -> None:
    from bench.analysis.figures import Line, lines

    intensities = sorted([on.ridge, *(2.0**power for power in range(-1, 17))])
    roof = Line("roof", intensities, [on.attainable(x) / 1e12 for x in intensities])
    marks = [
        Line(
            kind,
            [row.intensity for row in found.steps if row.kind == kind],
            [row.tflops_ceiling for row in found.steps if row.kind == kind],
            points=True,
        )
        for kind in dict.fromkeys(row.kind for row in found.steps)
    ]
    marks += [
        Line(
            f"measured: {kind}",
            [row.intensity for row in found.measured if row.kind == kind],
            [row.gflops / row.measured_s / 1000 for row in found.measured if row.kind == kind],
            points=True,
        )
        for kind in dict.fromkeys(row.kind for row in found.measured)
    ]
    lines(
        to / f"roofline_{found.model}_{found.gpu}.svg",
        [roof, *marks],
        x="FLOPs for each byte of memory traffic",
        y="TFLOPS",
        title=f"{found.model} on {found.gpu}",
        log_x=True,
        log_y=True,
        marks={"ridge": found.ridge},
    )
