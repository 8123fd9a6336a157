"""Trace formats: what each says, the traps, and errors that name file, line and remedy."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from replayer.traces.formats import Format, bailian, detect_format
from replayer.traces.loading import LoadOptions, iter_trace, load, load_trace, stream
from replayer.traces.trace import TraceError

Row = dict[str, Any]


def row(chat_id: int = 0, **changes: Any) -> Row:
    base = {
        "chat_id": chat_id,
        "parent_chat_id": -1,
        "timestamp": float(chat_id),
        "input_length": 130,
        "output_length": 5,
        "type": "coder",
        "turn": 1,
        "hash_ids": [3 * chat_id, 3 * chat_id + 1, 3 * chat_id + 2],
    }
    return base | changes


def write_lines(path: Path, rows: list[Row]) -> Path:
    data = "".join(json.dumps(item) + "\n" for item in rows).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    if path.suffix == ".zst":
        data = zstandard.compress(data)
    path.write_bytes(data)
    return path


def mooncake_rows(count: int, step: float) -> list[Row]:
    return [
        {"timestamp": step * i, "input_length": 1000, "output_length": 9, "hash_ids": [2 * i, 2 * i + 1]}
        for i in range(count)
    ]


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t.jsonl.zst"])
def test_bailian_is_read_from_plain_gzip_and_zstd(tmp_path: Path, name: str) -> None:
    rows = [
        row(0, session_id="a", think_time=0.0, api_time=2.5, tenant=3),
        row(1, session_id="a", parent_chat_id=0, turn=2, input_length=192, hash_ids=[0, 1, 9], subagent=True),
    ]
    trace = load_trace(write_lines(tmp_path / name, rows))
    assert (trace.block_tokens, trace.tail, trace.name) == (64, "ceil", name)
    first, second = trace.requests
    assert (first.session_id, first.api_time_s, first.tenant, first.think_time_s) == ("a", 2.5, "3", 0.0)
    assert (second.turn, second.parent_chat_id, second.subagent, second.think_time_s) == (2, 0, True, None)
    assert list(second.hash_ids) == [0, 1, 9]
    assert len(trace.sha256) == 64


def test_what_is_written_reads_back_the_same_and_the_same_bytes(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [row(i, session_id=f"s{i % 2}", turn=i // 2 + 1) for i in range(6)])
    trace = load_trace(source)
    for name in ("b.jsonl", "b.jsonl.gz", "b.jsonl.zst"):
        bailian.write(tmp_path / name, trace.requests)
        first = (tmp_path / name).read_bytes()
        assert load_trace(tmp_path / name).requests == trace.requests
        bailian.write(tmp_path / name, trace.requests)
        assert (tmp_path / name).read_bytes() == first


def test_sessions_follow_parents_where_the_trace_has_none(tmp_path: Path) -> None:
    rows = [
        row(0),
        row(1),
        row(2, parent_chat_id=0, turn=2),
        row(3, parent_chat_id=2, turn=3),
        row(4, parent_chat_id=99),
    ]
    trace = load_trace(write_lines(tmp_path / "t.jsonl", rows))
    assert [request.session_id for request in trace.requests] == ["s0", "s1", "s0", "s0", "s4"]
    assert trace.requests[4].parent_chat_id == -1
    assert any("parent that is not in the file" in note for note in trace.notes)


@pytest.mark.parametrize("given", [{}, {"session_id": "given"}])
def test_sessions_and_parents_do_not_depend_on_the_order_of_the_file(tmp_path: Path, given: Row) -> None:
    # 2 and 3 come at one instant, as calls without a think time do.
    rows = [
        row(0),
        row(1),
        row(2, parent_chat_id=0, turn=2),
        row(3, parent_chat_id=2, turn=3, timestamp=2.0),
        row(4, parent_chat_id=1, turn=2),
    ]
    rows = [item | given for item in rows]
    in_order = load_trace(write_lines(tmp_path / "t.jsonl", rows))
    reversed_ = load_trace(write_lines(tmp_path / "r.jsonl", rows[::-1]))
    assert reversed_.requests == in_order.requests
    assert [request.parent_chat_id for request in reversed_.requests] == [-1, -1, 0, 2, 1]
    assert reversed_.notes[:1] == ["the file was not in time order; sorted"]
    assert not any("parent" in note for note in reversed_.notes)


def test_a_request_that_names_itself_as_parent_is_a_first_turn(tmp_path: Path) -> None:
    trace = load_trace(write_lines(tmp_path / "t.jsonl", [row(0, parent_chat_id=0), row(1, parent_chat_id=0, turn=2)]))
    assert [(request.session_id, request.parent_chat_id) for request in trace.requests] == [("s0", -1), ("s0", 0)]
    assert trace.notes == ["1 request with its own id as parent; taken as first turn"]


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t.jsonl.zst"])
def test_a_byte_order_mark_is_ignored(tmp_path: Path, name: str) -> None:
    path = write_lines(tmp_path / "plain.jsonl", [row(0), row(1)])
    marked = tmp_path / name
    data = b"\xef\xbb\xbf" + path.read_bytes()
    marked.write_bytes(gzip.compress(data) if ".gz" in name else zstandard.compress(data) if ".zst" in name else data)
    assert load_trace(marked).requests == load_trace(path).requests


def test_timestamps_that_fit_no_unit_are_to_be_corrected(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", [row(i, timestamp=i * 1e30) for i in range(12)])
    with pytest.raises(TraceError, match=r"implausible; correct the timestamps \(or use --time-unit s to insist\)"):
        load_trace(path)


@pytest.mark.parametrize("reading", [load_trace, lambda path: list(stream(path).requests)])
def test_a_request_due_after_a_century_is_refused(tmp_path: Path, reading: Callable[[Path], object]) -> None:
    path = write_lines(tmp_path / "t.jsonl", [row(0), row(1, timestamp=1e300)])
    with pytest.raises(TraceError, match=r"request 1 is due 1e\+300 s after the trace's start; correct its timestamp"):
        reading(path)


@pytest.mark.parametrize(("length", "tail"), [(130, "ceil"), (200, "floor")])
def test_block_size_and_tail_rule_come_from_the_lengths(tmp_path: Path, length: int, tail: str) -> None:
    rows = [row(i, input_length=length + 13 * (i % 3)) for i in range(9)]
    trace = load_trace(write_lines(tmp_path / "t.jsonl", rows))
    assert (trace.block_tokens, trace.tail) == (64, tail)


def test_block_size_may_be_said_and_must_then_fit(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", [row(0, input_length=30, hash_ids=[1, 2])])
    assert load_trace(path, block_tokens=20).block_tokens == 20
    with pytest.raises(TraceError, match=r"2 hash_ids for 30 tokens.*--block-tokens"):
        load_trace(path, block_tokens=512)


def test_lengths_that_fit_no_block_size_are_refused(tmp_path: Path) -> None:
    rows = [row(i, input_length=130 + 977 * i) for i in range(20)]
    with pytest.raises(TraceError, match="no block size"):
        load_trace(write_lines(tmp_path / "t.jsonl", rows))


def test_one_id_too_many_is_cut_and_noted(tmp_path: Path) -> None:
    rows = [row(i) for i in range(12)]
    rows.append(row(12, input_length=128, hash_ids=[50, 51, 52]))
    trace = load_trace(write_lines(tmp_path / "t.jsonl", rows))
    assert list(trace.requests[-1].hash_ids) == [50, 51]
    assert any("one id too many" in note for note in trace.notes)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{broken", "not a Bailian-style request"),
        (json.dumps(row(1, session_id="SESSION")), "not a Bailian-style request"),
        ('{"chat_id": ' + "[" * 5_000, "not a Bailian-style request"),
        (json.dumps({"chat_id": 1}), "timestamp"),
        (json.dumps(row(1, input_length=0)), "at least one prompt token"),
        (json.dumps(row(1, output_length=-1)), "negative"),
        (json.dumps(row(1, hash_ids=[-4, 1, 2])), "negative hash id"),
        (json.dumps(row(1, hash_ids=[2**63, 1, 2])), "63 bits"),
        (json.dumps(row(0)), "occurs twice"),
        (json.dumps(row(1, input_length=1807.5)), r"Expected `int`, got `float` - at `\$\.input_length`"),
        (json.dumps(row(1, hash_ids=[1.5, 2, 3])), r"Expected `int`, got `float` - at `\$\.hash_ids"),
        (json.dumps(row(1, timestamp="nan")), r"Expected `float` >= -1e\+300 - at `\$\.timestamp`"),
        (json.dumps(row(1, think_time="inf")), r"Expected `float` <= 1e\+300 - at `\$\.think_time`"),
    ],
)
def test_a_bad_line_is_named_with_file_and_number(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "t.jsonl"
    text = json.dumps(row(0)) + "\n\n" + line + "\n"
    path.write_bytes(text.encode().replace(b"SESSION", b"caf\xe9"))  # Latin-1
    with pytest.raises(TraceError, match=words) as caught:
        load_trace(path)
    assert f"{path}:3" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"\n \n", "only blank lines"),
        (b"hello\n", "not a JSON object"),
        (b'{"session_id": "caf\xe9"}\n', "not a JSON object"),
        (b'{"a": 1}\n', "unknown trace format"),
        (b"[1]\n", "unknown trace format"),
    ],
)
def test_files_that_are_no_trace_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=words):
        load_trace(path)


def test_integers_written_as_floats_are_integers(tmp_path: Path) -> None:
    """As libraries of tables write the columns of a log with gaps."""
    exact = [row(0, session_id=7, turn=1), row(1, session_id=7, parent_chat_id=0, turn=2), row(2)]
    floats: list[Row] = [
        {
            name: [float(each) for each in value] if name == "hash_ids" else float(value)
            for name, value in item.items()
            if name != "type"
        }
        for item in exact
    ]
    floats[2] |= dict.fromkeys(("session_id", "turn", "type", "parent_chat_id", "think_time"))
    for item in exact:
        item["type"] = ""
    expected = load_trace(write_lines(tmp_path / "exact.jsonl", exact)).requests
    assert load_trace(write_lines(tmp_path / "floats.jsonl", floats)).requests == expected
    mooncake = [{**item, "input_length": 1000.0, "hash_ids": [0.0, 1.0]} for item in mooncake_rows(1, 0)]
    assert load_trace(write_lines(tmp_path / "m.jsonl", mooncake)).requests[0].input_length == 1000
    conversations = conversation("a", [call(0.0, [1]) | {"in": 69.0, "out": 7.0, "hash_ids": [1.0]}])
    (tmp_path / "a.json").write_text(json.dumps(conversations))
    assert load_trace(tmp_path / "a.json").requests[0].input_length == 69


def test_a_missing_file_and_a_cut_archive_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        load_trace(tmp_path / "nowhere.jsonl")
    whole = write_lines(tmp_path / "t.jsonl.gz", [row(i) for i in range(500)]).read_bytes()
    (tmp_path / "t.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match="damaged or cut"):
        load_trace(tmp_path / "t.jsonl.gz")


def zstd_frame(chat_ids: range) -> bytes:
    return zstandard.compress("".join(json.dumps(row(number)) + "\n" for number in chat_ids).encode())


def test_zstd_files_of_several_frames_are_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.zst"
    path.write_bytes(zstd_frame(range(20)) + zstd_frame(range(0)) + zstd_frame(range(20, 40)))
    assert len(load_trace(path).requests) == 40


@pytest.mark.parametrize("part", [0.02, 0.5, 0.99])
@pytest.mark.parametrize("before", [b"", zstd_frame(range(9))])
def test_a_cut_zstd_file_is_no_shorter_trace(tmp_path: Path, before: bytes, part: float) -> None:
    last = zstd_frame(range(9, 500))
    path = tmp_path / "t.jsonl.zst"
    path.write_bytes(before + last[: int(part * len(last))])
    with pytest.raises(TraceError, match="damaged or cut"):
        load_trace(path)


@pytest.mark.parametrize(("name", "header_bytes"), [("t.jsonl.gz", 10), ("t.json.gz", 10), ("t.jsonl.zst", 7)])
def test_damaged_compressed_data_is_named(tmp_path: Path, name: str, header_bytes: int) -> None:
    path = write_lines(tmp_path / name, [row(0)])
    content = bytearray(path.read_bytes())
    content[header_bytes] |= 0b110  # both formats reserve block type 3
    path.write_bytes(content)
    with pytest.raises(TraceError, match="damaged or cut"):
        load_trace(path)


def test_mooncake_times_are_milliseconds(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "m.jsonl", mooncake_rows(20, 500))
    assert detect_format(path) is Format.MOONCAKE
    trace = load_trace(path)
    assert trace.duration_s == pytest.approx(9.5)
    assert (trace.block_tokens, trace.tail) == (512, "ceil")


@pytest.mark.parametrize(("kind", "step", "unit"), [("mooncake", 0.05, "s"), ("bailian", 5_000_000, "us")])
def test_a_unit_of_time_that_cannot_be_is_refused_and_may_be_said(
    tmp_path: Path, kind: str, step: float, unit: str
) -> None:
    rows = mooncake_rows(20, step)
    if kind == "bailian":
        rows = [item | {"chat_id": index} for index, item in enumerate(rows)]
    path = write_lines(tmp_path / "m.jsonl", rows)
    with pytest.raises(TraceError, match=f"--time-unit {unit}"):
        load_trace(path)
    scale = {"s": 1.0, "us": 1e-6}[unit]
    trace = load(path, LoadOptions(time_unit=unit))  # type: ignore[arg-type]
    assert trace.duration_s == pytest.approx(19 * step * scale)


def test_mooncake_sessions_are_derived_by_whole_prompt_prefixes_and_said_so(tmp_path: Path) -> None:
    def ask(ids: list[int]) -> Row:
        return {"timestamp": 0, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}

    chains = [[0, 1, 2], [0, 5, 6], [0, 1, 2, 3], [0, 5, 6, 7], [0, 9], [0, 1, 2, 3, 4], [0, 5, 8]]
    rows = [ask(ids) | {"timestamp": 1000 * i} for i, ids in enumerate(chains)]
    trace = load_trace(write_lines(tmp_path / "m.jsonl", rows))
    assert [request.session_id for request in trace.requests] == ["s0", "s1", "s0", "s1", "s2", "s0", "s3"]
    assert [request.turn for request in trace.requests] == [1, 1, 2, 2, 1, 3, 1]
    assert any("derived" in note for note in trace.notes)
    single = load(tmp_path / "m.jsonl", LoadOptions(sessions="single"))
    assert len(single.sessions()) == len(rows)


def test_agent_text_becomes_estimated_blocks_in_time_order(tmp_path: Path) -> None:
    start = 1_760_428_436_442_742
    texts = ["x" * 300, "x" * 300 + "y" * 300, "z" * 10]
    rows = [
        {"timestamp": start + 2_000_000, "input": texts[1], "output": "ok go", "session_id": "a"},
        {"timestamp": start, "input": texts[0], "output": "", "session_id": "a"},
        {"timestamp": start + 500_000, "input": texts[2], "output": "hm", "session_id": "b"},
        {"timestamp": start + 600_000, "input": "", "output": "hm", "session_id": "b"},
    ]
    trace = load_trace(write_lines(tmp_path / "t.jsonl", rows))
    assert [request.timestamp_s for request in trace.requests] == [0.0, 0.5, 2.0]
    assert [request.text for request in trace.requests] == [texts[0], texts[2], texts[1]]
    assert [request.turn for request in trace.requests] == [1, 1, 2]
    first, _, last = trace.requests
    assert (first.input_length, last.output_length) == (75, 2)
    assert first.hash_ids[0] == last.hash_ids[0]
    assert first.hash_ids[1] != last.hash_ids[1]


def call(t: float, ids: list[int], **changes: Any) -> Row:
    return {"t": t, "type": "n", "in": 64 * len(ids) + 5, "out": 7, "hash_ids": ids, "api_time": 2.0} | changes


def conversation(name: str, requests: list[Row], scope: str = "local") -> Row:
    return {"id": name, "block_size": 64, "hash_id_scope": scope, "requests": requests}


def test_local_ids_are_namespaced_per_file_and_global_ones_kept(tmp_path: Path) -> None:
    for scope in ("local", "global"):
        folder = tmp_path / scope
        folder.mkdir()
        for name in ("a", "b"):
            (folder / f"{name}.json").write_text(json.dumps(conversation(name, [call(0.0, [1, 2, 3])], scope)))
    local, shared = load_trace(tmp_path / "local"), load_trace(tmp_path / "global")
    ids = [set(request.hash_ids) for request in local.requests]
    assert ids[0].isdisjoint(ids[1])
    assert list(shared.requests[0].hash_ids) == list(shared.requests[1].hash_ids)
    assert local.requests[1].timestamp_s == 10.0


def test_the_second_of_a_streaming_pair_is_dropped_and_a_late_repeat_kept(tmp_path: Path) -> None:
    calls = [call(0.0, [1, 2], type="s"), call(0.5, [1, 2]), call(50.0, [1, 2]), call(51.0, [1, 2, 3])]
    (tmp_path / "a.json").write_text(json.dumps(conversation("a", calls)))
    trace = load_trace(tmp_path / "a.json")
    assert [request.timestamp_s for request in trace.requests] == [0.0, 50.0, 51.0]
    assert any("streaming/non-streaming" in note for note in trace.notes)


@pytest.mark.parametrize("inner_t", [(0.0, 4.0), (100.0, 104.0)])
def test_a_sub_agent_is_a_session_of_its_own_at_its_markers_time(tmp_path: Path, inner_t: tuple[float, float]) -> None:
    marker = {
        "t": 100.0,
        "type": "subagent",
        "agent_id": "explore",
        "requests": [call(inner_t[0], [1, 8]), call(inner_t[1], [1, 8, 9])],
    }
    calls = [call(0.0, [1, 2]), call(90.0, [1, 2, 3]), marker, call(110.0, [1, 2, 3, 4])]
    (tmp_path / "a.json").write_text(json.dumps(conversation("a", calls)))
    trace = load(tmp_path / "a.json", LoadOptions(idle_gap_cap_s=1000.0))
    sessions = trace.sessions()
    assert list(sessions) == ["a", "a/explore@2"]
    child = sessions["a/explore@2"]
    assert [request.timestamp_s for request in child] == [100.0, 104.0]
    assert [request.turn for request in child] == [1, 2]
    assert all(request.subagent for request in child)
    assert child[0].hash_ids[0] == sessions["a"][0].hash_ids[0]


def test_idle_gaps_are_cut_for_the_whole_file(tmp_path: Path) -> None:
    calls = [
        call(0.0, [1]),
        call(10.0, [1, 2]),
        call(90_000.0, [1, 2, 3], think_time=89_988.0),
        call(90_005.0, [1, 2, 3, 4]),
    ]
    (tmp_path / "a.json").write_text(json.dumps(conversation("a", calls)))
    trace = load_trace(tmp_path / "a.json")
    assert [request.timestamp_s for request in trace.requests] == pytest.approx([0.0, 10.0, 72.0, 77.0])
    assert trace.requests[2].think_time_s == 60.0


@pytest.mark.parametrize("name", ["c.tar.zst", "c.tar.gz", "c.tar"])
def test_conversations_are_read_from_archives(tmp_path: Path, name: str) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for title in ("x", "y"):
            data = json.dumps(conversation(title, [call(0.0, [1, 2])])).encode()
            info = tarfile.TarInfo(f"{title}.json")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    packers: dict[str, Callable[[bytes], bytes]] = {
        "c.tar.zst": zstandard.compress,
        "c.tar.gz": gzip.compress,
        "c.tar": bytes,
    }
    pack = packers[name]
    (tmp_path / name).write_bytes(pack(buffer.getvalue()))
    assert list(load_trace(tmp_path / name).sessions()) == ["x", "y"]


def test_weka_errors_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"requests": [{"t": 0}')
    with pytest.raises(TraceError, match=r"a\.json"):
        load_trace(tmp_path / "a.json")
    (tmp_path / "a.json").write_text(json.dumps(conversation("a", [call(0.0, [1])], "galactic")))
    with pytest.raises(TraceError, match="galactic"):
        load_trace(tmp_path / "a.json")
    (tmp_path / "a.json").write_text('\n[{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}]')
    with pytest.raises(TraceError, match=r"write one object on each line of a \.jsonl file"):
        load_trace(tmp_path / "a.json")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(TraceError, match=r"no \.json"):
        load_trace(empty)


def test_a_limit_reads_no_further_and_a_stream_is_lazy(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    good = "".join(json.dumps(row(i)) + "\n" for i in range(400))
    path.write_text(good + "{broken\n")
    assert len(load_trace(path, limit=300).requests) == 300
    stream = iter_trace(path)
    assert [next(stream).chat_id for _ in range(3)] == [0, 1, 2]
    with pytest.raises(TraceError, match=":401"):
        list(stream)
