"""The file that the connector's hooks append to, read while engines run."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

import msgspec

from bench.instruments.engine import InstrumentError
from bench.instruments.hooked.stages import PairedRecords, pair_records, read_records

_WAIT_S = 10.0
"""For the last records: an engine writes them some steps after the client has its answer."""
_POLL_S = 0.05


class HookFile:
    """Records that are written from now on.

    Args:
        path: the file given to the engines; may appear later.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin = path.stat().st_size if path.exists() else 0

    def read(self) -> PairedRecords:
        """The hand-offs recorded so far.

        Raises:
            InstrumentError: there is no file, or it holds something else.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self._begin)
                return pair_records(read_records(file.read()))
        except OSError as error:
            raise InstrumentError(
                f"{self.path}: no records of the connector's hooks ({error.strerror}). Apply the hooks (`warmroute "
                f"measure hooks apply`) and start the engines with `--set env.WARMROUTE_TRANSFER_RECORDS={self.path}`"
            ) from error
        except msgspec.MsgspecError as error:
            raise InstrumentError(f"{self.path}: not a file of the connector's hooks ({error})") from error

    async def of(self, transfer_ids: Collection[str]) -> PairedRecords:
        """The records of these hand-offs, after a bounded wait until they are complete.

        Raises:
            InstrumentError: as for `read`.
        """
        wanted = set(transfer_ids)
        found = await asyncio.to_thread(self.read)
        try:
            async with asyncio.timeout(_WAIT_S):
                while not wanted <= found.complete.keys():
                    await asyncio.sleep(_POLL_S)
                    found = await asyncio.to_thread(self.read)
        except TimeoutError:
            pass
        missing = {each: found.incomplete.get(each, "no records") for each in wanted - found.complete.keys()}
        return PairedRecords({each: found.complete[each] for each in wanted & found.complete.keys()}, missing)
