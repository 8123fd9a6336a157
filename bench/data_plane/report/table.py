"""Terminal tables of a run: absolute medians, ratios to each peer, targets, errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.data_plane.launches import OURS
from bench.data_plane.measure import DataPlaneRecord
from bench.data_plane.report.ratios import Ratio, medians, ratios
from bench.data_plane.report.targets import check
from bench.data_plane.stacks import DIRECT

TITLES = {
    "cpu_ms": "CPU ms per request",
    "harness_rps": "req/s at that load",
    "added_p50_ms": "added TTFT p50 ms",
    "added_p99_ms": "added TTFT p99 ms",
    "cpu_us_event_1ms": "CPU µs per event, 8 streams x 1000/s",
    "cpu_us_event": "CPU µs per event, 64 streams x 100/s",
    "cpu_us_event_many": "CPU µs per event, 512 streams x 10/s",
    "max_rps": "max req/s",
    "many_errors": "512 streams: errors",
    "many_ttft_p99_ms": "512 streams: TTFT p99 ms",
    "many_rps": "512 streams: req/s",
    "abort_prefill_p50_ms": "abort during prefill p50 ms",
    "abort_prefill_p99_ms": "abort during prefill p99 ms",
    "abort_stream_p50_ms": "abort during stream p50 ms",
    "abort_stream_p99_ms": "abort during stream p99 ms",
    "rss_start_mb": "resident MB at start",
    "rss_mb": "resident MB after the prompts",
}
WORKLOADS = {
    "2k": "2 KB text",
    "130k": "130 KB text",
    "350k": "350 KB text",
    "ids": "200 KB token ids",
    "sessions": "sessions 20-240 KB",
}
MORE_IS_BETTER = ("max_rps", "many_rps", "harness_rps")
NO_RATIO = ("many_errors", "harness_rps")


def title(quantity: str) -> str:
    """Title of a quantity in the tables."""
    if quantity in TITLES:
        return TITLES[quantity]
    what, _, workload = quantity.rpartition("_")
    return f"{TITLES[what]}, {WORKLOADS[workload]}"


def quantities(record: DataPlaneRecord) -> list[str]:
    """The measured quantities, in the order of the titles."""
    known = [*TITLES]
    found = {quantity for sample in record.samples for quantity in sample.values}
    loads = [*WORKLOADS]

    def place(quantity: str) -> tuple[int, int]:
        if quantity in TITLES:
            return known.index(quantity), 0
        what, _, workload = quantity.rpartition("_")
        return known.index(what), loads.index(workload)

    return sorted(found, key=place)


def number(value: float | None) -> str:
    """Three significant digits, or all integer digits from 100 on."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _ratio(ratio: Ratio) -> str:
    spread = f" [{ratio.low:.2f} - {ratio.high:.2f}]" if ratio.rounds > 1 else ""
    return f"{ratio.median:.2f}{spread}"


def absolute(record: DataPlaneRecord) -> Table:
    """Medians over the rounds, one column per stack."""
    table = Table(title=f"Medians of {record.rounds} rounds, seed {record.seed}")
    table.add_column("quantity")
    for stack in record.stacks:
        table.add_column(stack, justify="right")
    found = medians(record.samples)
    for quantity in quantities(record):
        table.add_row(title(quantity), *(number(found.get((quantity, stack))) for stack in record.stacks))
    return table


def compared(record: DataPlaneRecord) -> Table:
    """Ratios of ours to each peer: median, lowest and highest of the rounds."""
    table = Table(title="warmroute to each peer: median of the rounds' ratios [lowest - highest]")
    table.add_column("quantity")
    peers = [stack for stack in record.stacks if stack not in (OURS, DIRECT)]
    for peer in peers:
        table.add_column(peer, justify="right")
    for quantity in quantities(record):
        if quantity.startswith(NO_RATIO):
            continue
        cells = []
        for peer in peers:
            ratio = ratios(record.samples, quantity, OURS, peer)
            cells.append("-" if ratio is None else _ratio(ratio))
        better = " (more is better)" if quantity.startswith(MORE_IS_BETTER) else ""
        if any(cell != "-" for cell in cells):
            table.add_row(title(quantity) + better, *cells)
    return table


def targets(record: DataPlaneRecord) -> Table:
    """The targets and whether each was met."""
    table = Table(title="Targets")
    for column in ("quantity", "limit", "found", ""):
        table.add_column(column, justify="left" if column in ("quantity", "") else "right")
    for finding in check(record.samples):
        limit = f"{finding.target.limit:g}" + (f" x {finding.target.peer}" if finding.target.peer else "")
        style = "green" if finding.met else "red"
        found = "not measured" if finding.value is None else f"{finding.value:.3g}"
        table.add_row(title(finding.target.quantity), limit, found, Text("met" if finding.met else "missed", style))
    return table


def notes(record: DataPlaneRecord) -> Iterator[str]:
    """Notes needed to read the figures."""
    for stack, note in record.stacks.items():
        yield f"{stack}: {note}"
    for stack, why in record.left_out.items():
        yield f"{stack} is left out: {why}"
    alone = [sample for sample in record.samples if sample.stack == DIRECT and sample.measurement == "saturation"]
    seconds = sum(sample.result.seconds for sample in alone if sample.result)
    if seconds:
        stub_s = sum(sample.stub_cpu_s for sample in alone)
        load_s = sum(sample.result.load_cpu_s for sample in alone if sample.result)
        yield (
            f"harness alone at its ceiling: engine stub {stub_s / seconds:.2f} and load generator "
            f"{load_s / seconds:.2f} CPU seconds per second"
        )
    render = record.render_stub_ms
    if render:
        yield (
            "vLLM Router's cache_aware has every engine render every text prompt. A 130 KB render costs the stub "
            f"{render['first']:.2f} ms of CPU the first time and {render['known']:.2f} ms after that; ids are made up. "
            "A real tokenizer takes tens of milliseconds for each (33k tokens); none of these figures include that"
        )
    for stack, lines in record.evidence.items():
        for line in lines:
            yield f"{stack}, own metrics: {line}"
    wrong: Counter[str] = Counter()
    for sample in record.samples:
        for what, count in sample.errors.items():
            wrong[f"{sample.stack}, {sample.measurement}: {what}"] += count
    for what, count in wrong.items():
        yield f"errors: {count} x {what}"
    where = record.machine
    yield f"{where['cpu']}, {where['cores']} cores, Python {where['python']}, load {where['load_average']} at the start"
    if where["load_average"][0] > where["cores"] / 2:
        yield "other work kept this machine busy when the run began: rates, p99 and streams are unreliable, CPU "
        "ratios less so"
    yield f"took {record.seconds:.0f} s"


def tables(record: DataPlaneRecord) -> RenderableType:
    """All tables of a run."""
    parts: list[RenderableType] = [absolute(record)]
    if OURS in record.stacks and len(set(record.stacks) - {OURS, DIRECT}):
        parts += [compared(record), targets(record)]
    return Group(*parts, *(Text(note, overflow="fold") for note in notes(record)))


def show(record: DataPlaneRecord, console: Console) -> None:
    """Print the tables."""
    console.print(tables(record), highlight=False)
