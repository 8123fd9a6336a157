"""Files of formats that are not read, given as a trace."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zipfile
from pathlib import Path

import pytest

from replayer.traces.loading import load_trace
from replayer.traces.trace import TraceError

LINE = '{"chat_id": 0}\n'


def zipped() -> bytes:
    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        archive.writestr("trace.jsonl", LINE)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "name", "remedy"),
    [
        ("x".encode("utf-16"), "UTF-16 text,", "iconv -f UTF-16"),
        (b"\xfe\xff" + "x".encode("utf-16-be"), "UTF-16 text,", "iconv -f UTF-16"),
        (LINE.encode("utf-16-le"), "UTF-16 text or another binary format", "iconv -f UTF-16"),
        (b"PAR1\x15\x04", "a Parquet file", "read_parquet(FILE).to_json(NEW, orient='records', lines=True)"),
        (b"ARROW1\0\0", "an Arrow file", "read_feather"),
        (zipped(), "a zip archive or Excel workbook", "CSV UTF-8"),
        (bz2.compress(b"{}"), "bzip2 data", "bunzip2"),
        (lzma.compress(b"{}"), "xz data", "unxz"),
    ],
)
@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv.gz"])
def test_files_of_other_formats_are_named_with_a_remedy(
    tmp_path: Path, content: bytes, name: str, remedy: str, ending: str
) -> None:
    path = tmp_path / f"trace{ending}"
    path.write_bytes(gzip.compress(content) if ending.endswith(".gz") else content)
    with pytest.raises(TraceError) as refused:
        load_trace(path)
    assert str(refused.value).startswith(f"{path}: {name}")
    assert remedy in str(refused.value)
