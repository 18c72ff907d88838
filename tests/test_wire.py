"""Wire frames: what is decoded is exactly what a peer of this protocol can have sent."""

from __future__ import annotations

import math
from dataclasses import replace

import msgpack
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pdxfer import wire
from pdxfer.errors import PeerError
from pdxfer.transport import MAX_HEADER_BYTES

SESSION = bytes(range(16))
sessions = st.binary(min_size=16, max_size=16)
chunks = st.integers(0, 2**31)
seconds = st.floats(0, 1e6)


@st.composite
def pieces(draw):
    entries = draw(st.lists(st.integers(-1, 2**62), max_size=20))
    start = draw(st.integers(0, 1000))
    total = draw(st.integers(start + len(entries), 1 << 24))
    packed = b"".join(e.to_bytes(8, "little", signed=True) for e in entries)
    return [draw(st.text(max_size=50)), start, total, packed]


frames = st.one_of(
    st.builds(wire.Hello, sessions, st.booleans(), st.lists(chunks, max_size=64)),
    st.builds(wire.Exported, sessions, st.integers(0, (1 << 20) - 1)),
    st.builds(wire.Tables, sessions, st.lists(pieces(), max_size=4), st.booleans()),
    st.builds(wire.Want, sessions, st.lists(chunks, max_size=64)),
    st.builds(wire.Data, sessions, chunks, st.lists(st.binary(min_size=16, max_size=16), max_size=9), seconds, seconds),
    st.builds(wire.Done, sessions, st.integers(0, 2**63 - 1)),
    st.builds(wire.Closed, sessions),
    st.builds(wire.Ask, sessions, st.binary(max_size=99), st.booleans(), st.lists(chunks, max_size=64)),
    st.builds(wire.Opened, sessions, st.binary(max_size=99), st.lists(pieces(), max_size=4), st.booleans()),
    st.builds(wire.Fail, sessions, *[st.text(max_size=50)] * 3),
)


@given(frames)
def test_round_trip(frame):
    header = wire.encode(frame)
    assert wire.decode(header) == frame
    assert len(header) <= MAX_HEADER_BYTES


def _decoded_or_refused(header: bytes) -> None:
    """Either a frame within bounds or PeerError; nothing else may come out of a peer's bytes."""
    try:
        frame = wire.decode(header)
    except PeerError:
        return
    assert len(frame.session) == 16
    if isinstance(frame, wire.Data):
        assert frame.chunk >= 0
        assert math.isfinite(frame.pack_s)
        assert math.isfinite(frame.digest_s)
    if isinstance(frame, (wire.Tables, wire.Opened)):
        for _, start, total, entries in frame.pieces:
            assert 0 <= start <= start + len(entries) // 8 <= total <= 1 << 24
    if isinstance(frame, (wire.Want, wire.Hello, wire.Ask)):
        assert len(frame.chunks) <= 64
        assert all(chunk >= 0 for chunk in frame.chunks)


@given(st.binary(max_size=300))
def test_noise_is_refused(noise):
    _decoded_or_refused(noise)


@given(frames, st.integers(0, 1 << 16), st.integers(0, 255))
def test_a_changed_byte_is_refused_or_still_within_bounds(frame, at, value):
    header = bytearray(wire.encode(frame))
    header[at % len(header)] = value
    _decoded_or_refused(bytes(header))


@given(frames, st.data())
def test_a_cut_or_longer_header_is_refused(frame, data):
    header = wire.encode(frame)
    for wrong in (header[: data.draw(st.integers(0, len(header) - 1))], header + b"\x00", header + header):
        with pytest.raises(PeerError):
            wire.decode(wrong)


junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=5),
              st.binary(max_size=20), sessions),
    lambda inner: st.lists(inner, max_size=4), max_leaves=10,
)  # fmt: skip


@given(st.one_of(st.integers(0, 12), junk), st.lists(junk, max_size=6), st.booleans())
def test_fields_of_any_type_are_refused_or_within_bounds(kind, fields, with_session):
    _decoded_or_refused(msgpack.packb([kind, *([SESSION] if with_session else []), *fields]))


@given(frames, st.data())
def test_one_field_of_another_type_is_refused_or_within_bounds(frame, data):
    fields = msgpack.unpackb(wire.encode(frame))
    fields[data.draw(st.integers(0, len(fields) - 1))] = data.draw(junk)
    _decoded_or_refused(msgpack.packb(fields))


@pytest.mark.parametrize(
    "fields",
    [
        [5, SESSION, -1, [], 0.0, 0.0],
        [5, SESSION, True, [], 0.0, 0.0],
        [5, SESSION, 0, [b"short"], 0.0, 0.0],
        [5, SESSION, 0, [], math.nan, 0.0],
        [5, SESSION, 0, [], 0.0, math.inf],
        [5, SESSION, 0, [], -1.0, 0.0],
        [4, SESSION, [0] * 65],
        [4, SESSION, [-1]],
        [3, SESSION, [["t", 0, 1, b"1234567"]], True],
        [3, SESSION, [["t", 1, 1, bytes(8)]], True],
        [3, SESSION, [["t", 0, 1 << 25, b""]], True],
        [3, SESSION, [["t", -1, 1, b""]], True],
        [3, SESSION, [["t", False, 1, b""]], True],
        [3, SESSION, [["t", 0, 1]], True],
        [3, SESSION, [], 1],
        [2, SESSION, -1],
        [2, SESSION, 1 << 20],
        [1, SESSION, 1, []],
        [1, SESSION, True, [-1]],
        [1, SESSION[:15], True, []],
        [6, SESSION.decode("latin-1"), 0],
        [6, SESSION, -1],
        [6, SESSION, True],
        [7, SESSION, "PeerError", "R", "x" * 4097],
        [7, SESSION, "PeerError", "R", b"x"],
        [8],
        [9, SESSION, b"", True, [-1]],
        [9, SESSION, "text", True, []],
        [10, SESSION, None, [], True],
        [10, SESSION, b"", [["t", 0, 1]], True],
        [11, SESSION],
        [],
        {},
    ],
)
def test_out_of_bounds_is_refused(fields):
    with pytest.raises(PeerError):
        wire.decode(msgpack.packb(fields))


def test_fields_of_a_later_version_are_ignored():
    frame = wire.Want(SESSION, [1, 2])
    fields = msgpack.unpackb(wire.encode(frame))
    assert wire.decode(msgpack.packb([*fields, "new", [b"x"]])) == frame


@pytest.mark.parametrize(
    "header", [b"", b"\x00" * (MAX_HEADER_BYTES + 1), b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 5000]
)
def test_lies_about_sizes_are_refused(header):
    with pytest.raises(PeerError):
        wire.decode(header)


def test_the_longest_tables_fit_into_a_header():
    piece = ["t" * 256, 0, 1 << 24, bytes(wire.TABLES_BYTES_MAX // 32)]
    frame = wire.Tables(SESSION, [piece] * 32, True)
    assert len(wire.encode(frame)) <= MAX_HEADER_BYTES
    assert wire.decode(wire.encode(frame)) == frame


PLACE = ("transfer", 3, 0, 1, 2, 4)


@given(st.binary(min_size=1, max_size=200), st.integers(0, 5), st.integers(1, 1000), st.integers(0, 1599))
def test_a_digest_is_of_the_bytes_and_of_their_place(data, field, delta, bit):
    right = wire.digest(data, wire.digest_seed(*PLACE))
    moved = list(PLACE)
    moved[field] = f"{PLACE[0]}{delta}" if field == 0 else moved[field] + delta
    assert wire.digest(data, wire.digest_seed(*moved)) != right
    flipped = bytearray(data)
    flipped[bit // 8 % len(data)] ^= 1 << bit % 8
    assert wire.digest(flipped, wire.digest_seed(*PLACE)) != right
    assert (
        wire.digest(bytearray(data), wire.digest_seed(*PLACE))
        == right
        == wire.digest(memoryview(data), wire.digest_seed(*PLACE))
    )
    assert len(right) == wire.DIGEST_BYTES


def test_places_that_read_alike_have_different_seeds():
    places = {
        (t, g, s, d, c, i)
        for t in ("1", "11")
        for g in (1, 11)
        for s in (1, 11)
        for d in (1, 11)
        for c in (1, 11)
        for i in (1, 11)
    }
    assert len({wire.digest_seed(*p) for p in places}) == len(places)


def test_the_digest_is_the_published_one():
    """Pinned: two versions of pdxfer must agree on it."""
    seed = wire.digest_seed(*PLACE)
    assert seed == xxhash.xxh3_64_intdigest(msgpack.packb(list(PLACE)))
    assert wire.digest(b"pdxfer", seed) == xxhash.xxh3_128_digest(b"pdxfer", seed)


def test_frames_are_values():
    frame = wire.Hello(SESSION, True, [0])
    assert replace(frame, digests=False) != frame
    with pytest.raises(AttributeError):
        frame.digests = False  # type: ignore[misc]
