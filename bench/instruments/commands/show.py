"""``warmroute measure show``: print the tables of a record again, and draw its figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from bench.analysis.output import Figures, Json, Markdown, Sheet, folder, show, stop

if TYPE_CHECKING:
    from bench.instruments.record import InstrumentRecord


def show_record(
    record: Annotated[Path, typer.Argument(help="Record that an instrument or `calibrate` wrote.")],
    figures: Figures = None,
    as_json: Json = False,
    as_markdown: Markdown = False,
) -> None:
    """Print the tables of a record again, and draw its figures.

    For machines that measure without matplotlib, too.
    """
    from bench.instruments.record import read_record

    try:
        found = read_record(record)
        sheets = _sheets(found, None if figures is None else folder(figures))
    except OSError as error:
        stop(f"{record}: {error.strerror}")
    except msgspec.MsgspecError as error:
        stop(f"{record}: not a record of an instrument: {error}")
    if not sheets:
        stop(f"{record}: no rows to show: its {found.instrument} has measured nothing that has a table")
    show(found, sheets, as_json=as_json, as_markdown=as_markdown)


def _sheets(record: InstrumentRecord, figures: Path | None) -> list[Sheet]:
    from bench.instruments.interference import InterferenceRow, interference_sheet
    from bench.instruments.overhead import OverheadRow, overhead_sheet
    from bench.instruments.transfer import TransferRow
    from bench.instruments.transfer_tables import parts_sheet, transfer_sheet

    rows = record.rows if record.instrument == "calibrate" else {record.instrument: record.rows}
    interference = msgspec.convert(rows.get("interference") or [], list[InterferenceRow])
    # The transfers of a calibration have the name of their kind in the plural.
    transfers = msgspec.convert(rows.get("transfer") or rows.get("transfers") or [], list[TransferRow])
    overhead = msgspec.convert(rows.get("overhead") or [], list[OverheadRow])
    sheets = []
    if interference:
        sheets.append(interference_sheet(interference))
    if transfers:
        sheets += [transfer_sheet(transfers, record.warnings), parts_sheet(transfers)]
    if overhead:
        sheets.append(overhead_sheet(overhead))
    if figures is not None:
        from bench.instruments.figures import draw_interference, draw_transfers

        if interference:
            draw_interference(interference, figures)
        if transfers:
            draw_transfers(transfers, figures)
    return sheets
