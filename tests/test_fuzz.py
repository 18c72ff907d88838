"""Fuzzing in small: saved inputs again, a few thousand new ones for each decoder, and proof that finds are found."""

from __future__ import annotations

import time

import pytest

from pdxfer.errors import InternalError, MisuseError
from pdxfer.testing import fuzz as fuzzing
from pdxfer.testing.decoders import DECODERS
from pdxfer.testing.fuzz import fuzz, main, mutations, read_corpus, try_one

every_decoder = pytest.mark.parametrize("name", DECODERS)


@every_decoder
def test_seeds_are_read_and_saved_inputs_do_no_harm(name):
    (_, seeds), saved = DECODERS[name](), read_corpus(name)
    assert saved
    report = fuzz(name, iter([*seeds, *saved, b"", b"\0", b"\xff"]))
    assert not report.finds
    assert report.accepted >= (
        len(seeds) if name in ("config", "control", "frame", "layout", "settings", "ticket") else 1
    )
    for data in saved:
        assert len(data) <= 4096


@every_decoder
def test_new_inputs_do_no_harm(name):
    report = fuzz(name, 700, seed=7)  # the same each time; the command tries others, and a million of them
    assert not report.finds, [(find.why, fuzzing.again(name, find.data)) for find in report.finds]
    assert report.inputs == 700


def test_mutations_are_the_same_for_a_seed():
    pool = [b'{"a": 1, "b": [2.5, null]}', bytes(range(64))]
    one, same, other = (list(mutations(pool, seed, 500)) for seed in (1, 1, 2))
    assert one == same != other
    assert len({*one}) > 400
    assert max(map(len, one)) > 10_000  # some are deep or long
    assert b"" in {data[:0] for data in one}


BAD = {
    "crash": lambda data: data[100],
    "blame": lambda data: _raise(InternalError("ours")),
    "hang": lambda data: _burn(0.02),
    "wait": lambda data: time.sleep(0.05),
    "memory": lambda data: bytearray(2 << 20),
    "good": lambda data: _raise(MisuseError("no")),
}


def _raise(error: Exception) -> None:
    raise error


def _burn(seconds: float) -> None:
    until_s = time.process_time() + seconds
    while time.process_time() < until_s:
        pass


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("crash", "IndexError"),
        ("blame", "blames us"),
        ("hang", "it took 0.0"),
        ("wait", "it took 0.00 s of CPU time"),
        ("memory", "of memory"),
    ],
)
def test_what_decoders_must_not_do_is_found(monkeypatch, capsys, name, why):
    monkeypatch.setattr(fuzzing, "HANG_S", 0.015)
    monkeypatch.setattr(fuzzing, "_WAIT_S", 0.045)
    bad = {word: lambda word=word: (BAD[word], []) for word in BAD}
    monkeypatch.setattr(fuzzing, "DECODERS", bad)
    (find,) = fuzz(name, iter([b"x"])).finds
    assert why in find.why
    assert find.data == b"x"
    assert not fuzz("good", iter([b"x"])).finds


def test_the_command_says_what_it_did_and_repeats_an_input(capsys):
    assert main(["--decoder", "frame", "--inputs", "50", "--seed", "3"]) == 0
    assert main(["--decoder", "keys", "--input", b"00".hex()]) == 0
    out = capsys.readouterr().out
    assert "50 inputs" in out
    assert out.count("no find") == 2
    assert try_one(lambda data: None, b"") == (True, "")
