"""Fuzzing: bytes that nobody would send, for every decoder; whatever is not a ``PdxferError`` is a find.

    python -m pdxfer.testing.fuzz --decoder ticket --inputs 1000000
    python -m pdxfer.testing.fuzz --decoder all --inputs 20000 --seed 7

In come a decoder's name and a count; out come a summary line for each decoder, and for a find its input in hexadecimal
with the command that repeats it (``--input``). Three things are finds: an exception that is no PdxferError (or one
that blames us), a second or more of CPU time (or ten by the clock) for one input, and memory beyond 16 times the input
and a constant.

Two engines: ``mutate``, seeded and plain, which measures memory; and ``atheris`` (``pip install atheris``), which
follows coverage. Inputs that made news are kept in ``tests/corpus/NAME.txt``, one a line, and replayed by the tests.
"""

from __future__ import annotations

import argparse
import base64
import logging
import os
import random
import re
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pdxfer.errors import InternalError, PdxferError
from pdxfer.testing.decoders import DECODERS

__all__ = ["Find", "Report", "again", "fuzz", "main", "mutations", "read_corpus", "try_one"]

HANG_S = 1.0
#: A second on the clock says little on a busy machine, so that CPU time counts; waiting takes none, but this long.
_WAIT_S = 10 * HANG_S
#: Memory that one input may cost: so many times its own bytes, and a constant for tables and messages.
BYTES_PER_BYTE, BYTES_AT_ALL = 16, 1 << 20
_LONGEST = 64 << 10
_POOL, _POOLED_BYTES = 512, 4096
_FINDS_MAX = 10


@dataclass(frozen=True, slots=True)
class Find:
    """One input that a decoder did not stand, and why."""

    data: bytes
    why: str


@dataclass(slots=True, kw_only=True)
class Report:
    """What came of one decoder."""

    decoder: str
    inputs: int = 0
    accepted: int = 0
    slowest_s: float = 0.0
    peak_bytes: int = 0
    finds: list[Find] = field(default_factory=list)

    def line(self) -> str:
        """For people."""
        finds = f"{len(self.finds)} FINDS" if self.finds else "no find"
        return (
            f"{self.decoder:<10} {self.inputs} inputs, {self.accepted} accepted, "
            f"slowest {self.slowest_s * 1000:.1f} ms, most memory {self.peak_bytes} B: {finds}"
        )


def try_one(decode: Callable[[bytes], object], data: bytes) -> tuple[bool, str]:
    """Whether an input was accepted, and what is wrong with what the decoder did ("": nothing)."""
    try:
        decode(data)
    except InternalError as error:
        return False, f"it blames us: {error.message}"
    except PdxferError:
        return False, ""
    except Exception as error:  # noqa: BLE001 - a find, whatever it is
        return False, f"{type(error).__name__}: {error}"
    return True, ""


def _timed(decode: Callable[[bytes], object], data: bytes) -> tuple[bool, str, float, float]:
    """As ``try_one``, and the seconds it took: of CPU time, and by the clock."""
    clock_s, cpu_s = time.perf_counter(), time.process_time()
    accepted, why = try_one(decode, data)
    return accepted, why, time.process_time() - cpu_s, time.perf_counter() - clock_s


def _hang(decode: Callable[[bytes], object], data: bytes, cpu_s: float, clock_s: float) -> str:
    """Why an input that took so long is a hang: it takes so long again and again."""
    if cpu_s < HANG_S and clock_s < _WAIT_S:
        return ""
    again = [_timed(decode, data)[2:] for _ in range(3)]
    cpu_s, clock_s = min(cpu for cpu, _ in again), min(clock for _, clock in again)
    return f"it took {cpu_s:.2f} s of CPU time, {clock_s:.2f} s" if cpu_s >= HANG_S or clock_s >= _WAIT_S else ""


def fuzz(name: str, inputs: Iterator[bytes] | int, *, seed: int = 0) -> Report:
    """Try a decoder with so many mutations of its seeds and corpus, or with the inputs given."""
    report, (decode, seeds) = Report(decoder=name), DECODERS[name]()
    pool = [*seeds, *read_corpus(name)]
    for data in pool:
        try_one(decode, data)  # so that what is made once is not counted against the first input
    source = mutations(pool, seed, inputs) if isinstance(inputs, int) else inputs
    ours = not tracemalloc.is_tracing()
    if ours:
        tracemalloc.start(1)
    try:
        for data in source:
            report.inputs += 1
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            accepted, why, cpu_s, clock_s = _timed(decode, data)
            peak = tracemalloc.get_traced_memory()[1] - before
            report.accepted += accepted
            report.slowest_s, report.peak_bytes = max(report.slowest_s, cpu_s), max(report.peak_bytes, peak)
            why = why or _hang(decode, data, cpu_s, clock_s)
            if not why and peak > BYTES_PER_BYTE * len(data) + BYTES_AT_ALL:
                why = f"it took {peak} B of memory for {len(data)} B"
            if accepted and len(data) <= _POOLED_BYTES and len(pool) < _POOL and isinstance(inputs, int):
                pool.append(data)  # what is accepted is a step towards what is accepted and rare
            if why:
                report.finds.append(Find(data, why))
                if len(report.finds) >= _FINDS_MAX:
                    break
    finally:
        if ours:
            tracemalloc.stop()
    return report


# -- mutations -------------------------------------------------------------------------------------

_BYTES = (
    b"\0",
    b"\x7f",
    b"\x80",
    b"\xff",
    b"\xff" * 4,
    b"\xff" * 8,
    b"\0" * 8,
    b"\x7f" + b"\xff" * 7,
    b"\x80" + b"\0" * 7,
)
_HEADS = (b"\xdd\xff\xff\xff\xff", b"\xdb\x7f\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff",
          b"\xc9\xff\xff\xff\xff\x01", b"\x93", b"\xc0", b"\xc3", b"\xcb\x7f\xf8" + b"\0" * 6,
          b"\xff\xff\xff\xff\x0f", b"\x0a\xff\xff\xff\xff\x07")  # fmt: skip
_NUMBERS = (b"-1", b"0", b"1", b"2", b"65536", b"4294967296", b"9223372036854775807", b"1" + b"0" * 40, b"1e308",
            b"NaN", b"Infinity", b"-0.0", b"null", b"true", b'"x"', b"[]", b"{}", b"[[]]")  # fmt: skip
_A_NUMBER, _A_WORD = re.compile(rb"-?\d+(\.\d+)?|true|false|null"), re.compile(rb'"[^"]{1,40}"')
_DEEP = (b"[", b'{"a":', b"\x91", b"\x81\xa1a", b"\x0a\x80\x01", b"text_config")


def mutations(pool: Sequence[bytes], seed: int, count: int) -> Iterator[bytes]:
    """``count`` inputs made of those in ``pool``, which may grow meanwhile; the same for the same seed."""
    chance = random.Random(seed)  # noqa: S311 - nobody has to be surprised but our own code
    for _ in range(count):
        data = bytearray(chance.choice(pool))
        for _ in range(min(8, 1 + int(chance.expovariate(0.7)))):
            chance.choice(_MUTATE)(data, chance, pool)
        yield bytes(data[:_LONGEST])


def _flip(data: bytearray, chance: random.Random, _: Sequence[bytes]) -> None:
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _write(data: bytearray, chance: random.Random, _: Sequence[bytes]) -> None:
    at, new = chance.randrange(len(data) + 1), chance.choice((*_BYTES, *_HEADS, chance.randbytes(3)))
    data[at : at + len(new)] = new


def _insert(data: bytearray, chance: random.Random, _: Sequence[bytes]) -> None:
    at = chance.randrange(len(data) + 1)
    data[at:at] = chance.choice((*_BYTES, *_HEADS, chance.randbytes(chance.randrange(1, 9))))


def _cut(data: bytearray, chance: random.Random, _: Sequence[bytes]) -> None:
    at = chance.randrange(len(data) + 1)
    del data[at : at + chance.choice((1, 1, 2, 4, 16, 1 << 20))]


def _repeat(data: bytearray, chance: random.Random, _: Sequence[bytes]) -> None:
    at = chance.randrange(len(data) + 1)
    piece = bytes(data[at : at + chance.randrange(1, 64)])
    data[at:at] = piece * chance.choice((1, 2, 50))


def _splice(data: bytearray, chance: random.Random, pool: Sequence[bytes]) -> None:
    other = chance.choice(pool)
    data[chance.randrange(len(data) + 1) :] = other[chance.randrange(len(other) + 1) :]


def _one_of(pattern: re.Pattern[bytes], data: bytearray, chance: random.Random) -> tuple[int, int] | None:
    """Where one match is, from a random place on; None: there is none."""
    found = pattern.search(data, chance.randrange(len(data) + 1)) or pattern.search(data)
    return found.span() if found else None


def _number(data: bytearray, chance: random.Random, _: Sequence[bytes]) -> None:
    """In text: another value in a number's place."""
    if found := _one_of(_A_NUMBER, data, chance):
        data[slice(*found)] = chance.choice(_NUMBERS)


def _field(data: bytearray, chance: random.Random, _: Sequence[bytes]) -> None:
    """In text: a quoted word becomes another one of it."""
    if (found := _one_of(_A_WORD, data, chance)) and (other := _one_of(_A_WORD, data, chance)):
        new = (bytes(data[slice(*other)]), b'""', b'"' + b"x" * 300 + b'"', b"7")
        data[slice(*found)] = chance.choice(new)


def _deepen(data: bytearray, chance: random.Random, _: Sequence[bytes]) -> None:
    at = chance.randrange(len(data) + 1)
    data[at:at] = chance.choice(_DEEP) * chance.choice((2, 100, 1100, 20_000))


_MUTATE = (_flip, _flip, _flip, _write, _write, _insert, _cut, _repeat, _splice, _number, _number, _field, _deepen)


# -- corpus and command line -----------------------------------------------------------------------


def read_corpus(name: str) -> list[bytes]:
    """The inputs of ``tests/corpus/NAME.txt``: base64, one a line, with comments after ``#``; none when not there."""
    path = Path(__file__).parents[2] / "tests" / "corpus" / f"{name}.txt"
    lines = path.read_text(encoding="ascii").splitlines() if path.exists() else []
    return [base64.b64decode(text) for line in lines if (text := line.partition("#")[0].strip())]


def _with_atheris(name: str, count: int, seed: int) -> None:
    """Never returns: libFuzzer ends the process, with 77 after a find."""
    import atheris

    with atheris.instrument_imports(include=["pdxfer"]):
        decode, seeds = DECODERS[name]()

    def one(data: bytes) -> None:
        _, why = try_one(decode, data)
        if why:
            sys.stderr.write(f"{Find(data, why)}\n{again(name, data)}\n")
            raise RuntimeError(why)

    directory = Path(os.environ.get("TMPDIR", "/tmp")) / f"pdxfer-fuzz-{os.getpid()}"  # noqa: S108 - our own, made anew
    directory.mkdir(mode=0o700)
    for index, data in enumerate([*seeds, *read_corpus(name)]):
        (directory / str(index)).write_bytes(data)
    limits = ["-timeout=1", "-max_len=65536", "-print_final_stats=1", f"-artifact_prefix={directory}/find-"]
    atheris.Setup([sys.argv[0], f"-runs={count}", f"-seed={seed + 1}", *limits, str(directory)], one)
    atheris.Fuzz()


def again(name: str, data: bytes) -> str:
    """The command that repeats one input."""
    return f"python -m pdxfer.testing.fuzz --decoder {name} --input {data.hex() or '-'}"


def main(arguments: Sequence[str]) -> int:
    """Run one command line; 1 when there was a find."""
    parser = argparse.ArgumentParser(prog="python -m pdxfer.testing.fuzz", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--decoder", default="all", choices=["all", *DECODERS])
    parser.add_argument("--inputs", type=int, default=10_000, help="how many, for each decoder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", default="mutate", choices=["mutate", "atheris"])
    parser.add_argument("--input", help="one input, in hexadecimal, instead")
    asked = parser.parse_args(arguments)
    names = list(DECODERS) if asked.decoder == "all" else [asked.decoder]
    if asked.engine == "atheris":
        _with_atheris(names[0], asked.inputs, asked.seed)
    failed = False
    for name in names:
        given = None if asked.input is None else iter([bytes.fromhex(asked.input.replace("-", ""))])
        report = fuzz(name, given or asked.inputs, seed=asked.seed)
        print(report.line(), flush=True)
        for find in report.finds:
            print(f"  {find.why[:300]}\n  {again(name, find.data)[:4000]}", flush=True)
        failed = failed or bool(report.finds)
    return int(failed)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)  # what a decoder logs about bad bytes is not what we look for
    sys.exit(main(sys.argv[1:]))
