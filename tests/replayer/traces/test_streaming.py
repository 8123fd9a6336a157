"""Long traces: keys chained without a memory, traces repeated in time, requests read one by one."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayer.traces.chaining import Chainer
from replayer.traces.formats import bailian
from replayer.traces.ideal import ideal
from replayer.traces.loading import LoadOptions, iter_trace, load, stream
from replayer.traces.repeat import repeated
from replayer.traces.synth import SynthOptions, synthetic_trace
from replayer.traces.trace import Trace, TraceError, TraceRequest

IDS = st.lists(st.integers(0, 9) | st.integers(0, 2**63 - 1), max_size=30)


def small(requests: int = 80) -> Trace:
    return synthetic_trace(SynthOptions(requests=requests, seed=3, length_scale=0.1))


def common(first: list[int], second: list[int]) -> int:
    """Length of the common prefix."""
    return next(
        (place for place, (one, other) in enumerate(zip(first, second, strict=False)) if one != other),
        min(len(first), len(second)),
    )


@given(first=IDS, second=IDS, shared=st.integers(0, 30))
def test_chained_keys_are_equal_exactly_as_far_as_the_ids_are(first: list[int], second: list[int], shared: int) -> None:
    second = first[:shared] + second
    chainer = Chainer()
    keys, others = list(chainer.keys(array("q", first))), list(chainer.keys(second))
    assert len(keys) == len(first)
    assert all(0 <= key < 2**63 for key in keys)
    agree = common(first, second)
    assert keys[:agree] == others[:agree]
    assert not set(keys[agree:]) & set(others[agree:])


def test_swapped_ids_have_other_keys() -> None:
    chainer = Chainer()
    keys = [tuple(chainer.keys(ids)) for ids in ([1, 2, 3], [2, 1, 3], [3, 2, 1], [0, 3, 3], [2, 2, 2])]
    assert len({each[-1] for each in keys}) == len(keys)


def test_a_repeated_trace_has_new_sessions_and_blocks_at_the_same_rate() -> None:
    trace = small()
    long = Trace(requests=list(repeated(trace, 3)), block_tokens=64, name="long")
    assert len(long.requests) == 240
    assert len(long.sessions()) == 3 * len(trace.sessions())
    assert len({request.chat_id for request in long.requests}) == 240
    times = [request.timestamp_s for request in long.requests]
    assert times == sorted(times)
    assert long.duration_s / 239 == pytest.approx(trace.duration_s / 79, rel=1e-6)
    one, three = ideal(trace, 4), ideal(long, 4)
    # System prompts stay shared, so later repetitions hit what the first could not.
    assert one.shared_apc <= three.shared_apc < one.shared_apc + 0.2
    assert three.sticky_apc == pytest.approx(one.sticky_apc, abs=0.1)
    for number, request in enumerate(long.requests):
        original = trace.requests[number % 80]
        assert (request.input_length, request.output_length, request.turn) == (
            original.input_length,
            original.output_length,
            original.turn,
        )
        assert len(request.hash_ids) == len(original.hash_ids)
    children = [request for request in long.requests if request.parent_chat_id != -1]
    sessions = {request.chat_id: request.session_id for request in long.requests}
    assert children
    assert all(sessions[request.parent_chat_id] == request.session_id for request in children)


def test_repetitions_share_what_several_sessions_share_and_nothing_else() -> None:
    def request(chat_id: int, session: str, ids: list[int]) -> TraceRequest:
        return TraceRequest(
            chat_id=chat_id,
            session_id=session,
            timestamp_s=float(chat_id),
            input_length=64 * len(ids),
            output_length=1,
            hash_ids=array("q", ids),
        )

    trace = Trace(requests=[request(0, "a", [1 << 50, 7, 8]), request(1, "b", [1 << 50, 9])], block_tokens=64)
    first, second, third, fourth = (list(each.hash_ids) for each in repeated(trace, 2))
    assert first[0] == second[0] == third[0] == fourth[0]
    assert not {*first[1:], *second[1:]} & {*third[1:], *fourth[1:]}
    with pytest.raises(TraceError, match="--times"):
        next(repeated(trace, 0))
    with pytest.raises(TraceError, match="no requests"):
        next(repeated(Trace(requests=[], block_tokens=64), 2))


def test_a_stream_gives_what_loading_gives(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.zst"
    trace = small()
    for request in trace.requests:
        request.timestamp_s += 1.7e9  # dates are rebased to the first request
    bailian.write(path, trace.requests)
    loaded, opened = load(path), stream(path, LoadOptions(chain="keep"))
    assert (opened.name, opened.sha256, opened.block_tokens, opened.tail) == (
        loaded.name,
        loaded.sha256,
        loaded.block_tokens,
        loaded.tail,
    )
    assert list(opened.requests) == loaded.requests


def test_a_stream_numbers_turns_as_loading_does(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    turns = [("branch", 3), ("branch", 4), ("plain", 7), ("branch", 4), ("branch", 1), ("plain", 9), ("branch", 12)]
    requests = [
        TraceRequest(
            chat_id=number, session_id=session, turn=turn, timestamp_s=number * 1.0, input_length=64, hash_ids=[1]
        )
        for number, (session, turn) in enumerate(turns)
    ]
    bailian.write(path, requests)
    loaded = load(path)
    assert [request.turn for request in loaded.requests] == [3, 4, 7, 5, 6, 9, 12]
    assert "1 session with branches or repeated turn numbers" in loaded.notes[-1]
    assert [request.turn for request in stream(path).requests] == [request.turn for request in loaded.requests]


def test_turns_without_numbers_are_numbered_and_no_fault_of_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    turns: list[tuple[str, int | None]] = [("a", None), ("b", 4), ("a", None), ("b", None), ("b", 9)]
    rows = [
        {"chat_id": place, "timestamp": place, "input_length": 64, "output_length": 1, "hash_ids": [1]}
        | {"session_id": session, "turn": turn}
        for place, (session, turn) in enumerate(turns)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    loaded = load(path)
    assert [request.turn for request in loaded.requests] == [1, 4, 2, 5, 9]
    assert loaded.notes == []
    assert [request.turn for request in stream(path).requests] == [1, 4, 2, 5, 9]
    assert [request.turn for request in iter_trace(path)] == [1, 4, 1, 1, 9]


def test_unchained_ids_are_shared_as_after_the_loaders_repair(tmp_path: Path) -> None:
    """The ids of this trace are of single blocks: equal ones after different histories are different prefixes."""
    path = tmp_path / "trace.jsonl"
    rows = [[1, 2, 3, 4], [1, 2, 9, 4], [5, 2, 3], [1, 2, 3, 4, 5]]
    requests = [
        TraceRequest(
            chat_id=number,
            session_id=f"s{number}",
            timestamp_s=number * 1.0,
            input_length=64 * len(ids),
            output_length=1,
            hash_ids=array("q", ids),
        )
        for number, ids in enumerate(rows)
    ]
    bailian.write(path, requests)
    repaired = [list(request.hash_ids) for request in load(path, LoadOptions(block_tokens=64)).requests]
    keyed = [list(request.hash_ids) for request in stream(path, LoadOptions(block_tokens=64)).requests]
    for one in range(4):
        for other in range(4):
            assert common(keyed[one], keyed[other]) == common(repaired[one], repaired[other])
            assert len(set(keyed[one]) & set(keyed[other])) == common(keyed[one], keyed[other])


def test_streams_that_cannot_be_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = small()
    bailian.write(path, [trace.requests[1], trace.requests[0], *trace.requests[2:]])
    with pytest.raises(TraceError, match="before the one above it"):
        list(stream(path).requests)
    with pytest.raises(TraceError, match="cannot be checked for unchained ids"):
        stream(path, LoadOptions(chain="error"))
    text = tmp_path / "text.jsonl"
    text.write_text('{"timestamp": 1, "input": "' + "a" * 400 + '", "output": "b", "session_id": "s"}\n')
    with pytest.raises(TraceError, match="cannot be streamed"):
        stream(text)


def test_a_stream_does_not_derive_sessions_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    prompts = [[1, 2], [5, 6], [1, 2, 3]]
    rows = [
        {"timestamp": 1000 * number, "input_length": 512 * len(ids), "output_length": 4, "hash_ids": ids}
        for number, ids in enumerate(prompts)
    ]
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    assert len({request.session_id for request in load(path).requests}) == 2
    with pytest.raises(TraceError, match=r"--sessions single .* leave out --stream"):
        stream(path)
    single = list(stream(path, LoadOptions(sessions="single")).requests)
    assert len({request.session_id for request in single}) == 3
    assert len(list(iter_trace(path))) == 3


@pytest.mark.parametrize("session", [{}, {"session_id": "given"}])
def test_a_stream_refuses_a_request_above_its_parent(tmp_path: Path, session: dict[str, str]) -> None:
    path = tmp_path / "trace.jsonl"
    base = {"timestamp": 1.0, "input_length": 64, "output_length": 1, "hash_ids": [1]} | session
    rows = [{"chat_id": 2, "parent_chat_id": 1, "turn": 2}, {"chat_id": 1}]
    path.write_bytes(b"".join(msgspec.json.encode(base | row) + b"\n" for row in rows))
    refusal = r"request 2 comes before its parent 1.*load it whole, or sort it"
    with pytest.raises(TraceError, match=refusal):
        list(stream(path).requests)
    with pytest.raises(TraceError, match=refusal):
        list(iter_trace(path))
    assert [request.chat_id for request in load(path).requests] == [1, 2]


def test_what_a_reader_remembers_is_bounded(tmp_path: Path) -> None:
    """A parent or a second use of a chat id is known within the last requests, and no further back."""
    path = tmp_path / "trace.jsonl"
    requests = [
        TraceRequest(
            chat_id=number, timestamp_s=number * 1.0, input_length=64, output_length=1, hash_ids=array("q", [number])
        )
        for number in range(10)
    ]
    near = TraceRequest(
        chat_id=10, parent_chat_id=9, timestamp_s=10.0, input_length=64, output_length=1, hash_ids=array("q", [10])
    )
    far = TraceRequest(
        chat_id=11, parent_chat_id=0, timestamp_s=11.0, input_length=64, output_length=1, hash_ids=array("q", [11])
    )
    rows = [bailian.to_row(request) for request in (*requests, near, far)]
    for row in rows:
        del row["session_id"]
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    notes: list[str] = []
    read = list(bailian.read(path, 1.0, notes, remembered=5))
    assert (read[10].session_id, read[10].parent_chat_id) == ("s9", 9)
    assert (read[11].session_id, read[11].parent_chat_id) == ("s11", -1)
    assert notes == ["1 request with a parent that is not in the file (cut window)"]
    assert list(bailian.read(path, 1.0, []))[11].session_id == "s0"
