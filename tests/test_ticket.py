"""Tickets: they come back as they went out, and nothing else does."""

from __future__ import annotations

import base64
import secrets
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdxfer.errors import StaleError, TicketError
from pdxfer.keys import TicketKeys, key_id
from pdxfer.ticket import TICKET_VERSION, RankIssuer, RankTicket, Ticket, issue_ticket, seal_rank, unseal

EPOCH, KEY = bytes(range(16)), bytes(range(32))
COMMON = Ticket(
    transfer="request-1", worker="P", layout_digest="d" * 64, state_tokens=36, kv_tokens=37, sampled=(11, 0, 151643)
)

texts = st.text(st.characters(codec="utf-8"), max_size=20)
counts = st.integers(0, 2**63 - 1)
parts = st.builds(
    RankTicket,
    rank=st.integers(0, 1023),
    address=texts,
    epoch=st.binary(min_size=16, max_size=16),
    nonce=st.binary(min_size=16, max_size=16),
    key_id=st.binary(min_size=8, max_size=8),
    seal=st.binary(min_size=32, max_size=32),
)
tickets = st.builds(
    Ticket,
    transfer=texts,
    worker=texts,
    layout_digest=texts,
    state_tokens=counts,
    kv_tokens=counts,
    sampled=st.lists(counts, max_size=5).map(tuple),
    context=st.binary(max_size=32),
    nbytes=counts,
    tenant=texts,
    audience=texts,
    lifetime_s=counts,
    ranks=st.lists(parts, max_size=4).map(tuple),
)


def part(rank: int = 0, *, epoch: bytes = EPOCH) -> RankTicket:
    return RankTicket(rank=rank, address=f"unix:///run/pdxfer/{rank}", epoch=epoch, nonce=bytes([rank + 7] * 16))


def sealed(rank: int = 0, *, key: bytes = KEY) -> Ticket:
    return seal_rank(COMMON, part(rank), key)


def accept(text: str | bytes, rank: int = 0, *, epoch: bytes = EPOCH, key: bytes = KEY) -> RankTicket:
    """What a source rank does with a ticket it is shown."""
    return unseal(Ticket.decode(text), rank, epoch, [key])


@given(tickets)
def test_round_trip(ticket):
    text = ticket.encode()
    assert Ticket.decode(text) == Ticket.decode(text.encode()) == ticket
    assert text.isascii()


@given(st.lists(st.binary(min_size=32, max_size=40), min_size=1, max_size=5, unique=True), st.randoms())
def test_joined_ticket_carries_every_rank_s_own_seal(keys, random):
    own = [sealed(rank, key=key) for rank, key in enumerate(keys)]
    random.shuffle(own)
    text = Ticket.join(own).encode()
    for rank, key in enumerate(keys):
        assert accept(text, rank, key=key) == replace(
            part(rank), key_id=key_id(key), seal=accept(text, rank, key=key).seal
        )
        for other in keys:
            if other != key:
                with pytest.raises(TicketError, match="seal"):
                    accept(text, rank, key=other)


def test_every_single_character_edit_is_refused():
    text = Ticket.join([sealed(0)]).encode()
    alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_+/= \n\x00\xff"
    for at in range(len(text)):
        for new in {bytes([b]) for b in alphabet} - {text[at].encode()}:
            edited = text[:at].encode() + new + text[at + 1 :].encode()
            with pytest.raises((TicketError, StaleError)):
                accept(edited)


def test_every_truncation_and_extension_is_refused():
    text = Ticket.join([sealed(0)]).encode()
    for n in range(len(text)):
        with pytest.raises(TicketError):
            accept(text[:n])
    for tail in ("A", "=", "AAAA", text, "\n"):
        with pytest.raises(TicketError):
            accept(text + tail)


def test_every_bit_flip_under_the_encoding_is_refused():
    raw = base64.urlsafe_b64decode(Ticket.join([sealed(0)]).encode())
    for at in range(len(raw)):
        for bit in range(8):
            edited = bytearray(raw)
            edited[at] ^= 1 << bit
            with pytest.raises((TicketError, StaleError)):
                accept(base64.urlsafe_b64encode(edited))


@pytest.mark.parametrize(
    "change",
    [
        {"transfer": "request-2"},
        {"worker": "Q"},
        {"layout_digest": "e" * 64},
        {"state_tokens": 37},
        {"kv_tokens": 36},
        {"sampled": (11, 0)},
        {"sampled": ()},
        {"context": b"x"},
        {"nbytes": 1},
        {"tenant": "another"},
        {"audience": "D"},
        {"lifetime_s": 601},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_common_field_is_sealed(change):
    with pytest.raises(TicketError, match="seal"):
        accept(replace(sealed(), **change).encode())


@pytest.mark.parametrize(
    "change", [{"address": "unix:///elsewhere"}, {"nonce": bytes(16)}, {"seal": bytes(32)}, {"key_id": bytes(8)}]
)
def test_every_field_of_a_rank_s_part_is_sealed(change):
    ticket = sealed()
    with pytest.raises(TicketError, match="seal"):
        accept(replace(ticket, ranks=(replace(ticket.ranks[0], **change),)).encode())


def test_a_part_renumbered_to_another_rank_of_the_same_key_is_refused():
    ticket = sealed(0)
    with pytest.raises(TicketError, match="seal"):
        accept(replace(ticket, ranks=(replace(ticket.ranks[0], rank=1),)).encode(), 1)


def test_another_epoch_is_stale_not_edited():
    with pytest.raises(StaleError) as caught:
        accept(sealed().encode(), epoch=secrets.token_bytes(16))
    assert caught.value.reason == "EPOCH_CHANGED"


def test_a_short_key_neither_seals_nor_accepts():
    with pytest.raises(TicketError, match="key"):
        sealed(key=b"short")
    forged = seal_rank(COMMON, part(), KEY)
    for key in (b"", b"short"):
        with pytest.raises(TicketError):
            accept(forged.encode(), key=key)


def test_a_missing_rank_is_named():
    with pytest.raises(TicketError, match="source rank 3"):
        accept(sealed().encode(), 3)


@pytest.mark.parametrize(
    "change", [{"transfer": "x"}, {"worker": "x"}, {"layout_digest": "x"}, {"state_tokens": 1}, {"sampled": (1,)}]
)
def test_ranks_that_disagree_make_no_ticket(change):
    with pytest.raises(TicketError, match="disagree"):
        Ticket.join([sealed(0), replace(sealed(1), **change)])


def test_a_ticket_written_elsewhere_in_a_rank_s_name_is_the_rank_s_own():
    issuers = [
        RankIssuer(
            worker="P",
            layout_digest="d" * 64,
            rank=r,
            address=f"unix:///{r}",
            epoch=EPOCH,
            keys=TicketKeys((bytes([r] * 32),)),
        )
        for r in range(3)
    ]
    facts = {"kv_tokens": 37, "state_tokens": 36, "sampled": [1], "context": b"c", "nonce": bytes(range(16))}
    whole = issue_ticket(issuers, "t", **facts)
    assert Ticket.decode(whole.encode()) == whole
    for issuer in issuers:
        assert accept(whole.encode(), issuer.rank, key=issuer.keys.keys[0]) == issuer.issue("t", **facts).ranks[0]
        assert str(issuer.keys.keys[0]) not in repr(issuer)


@pytest.mark.parametrize("facts", [{"sampled": ["x"]}, {"kv_tokens": 1 << 70}, {"nonce": b"short"}, {"context": "x"}])
def test_what_no_ticket_can_carry_is_refused_when_it_is_written(facts):
    issuer = RankIssuer(
        worker="P", layout_digest="d", rank=0, address="unix:///x", epoch=EPOCH, keys=TicketKeys((KEY,))
    )
    with pytest.raises(TicketError):
        issuer.issue("t", **({"kv_tokens": 1, "state_tokens": 1, "nonce": bytes(16)} | facts))


@pytest.mark.parametrize("ranks", [(), (1,), (0, 2), (0, 0), (0, 1, 1)])
def test_a_join_needs_every_rank_once(ranks):
    with pytest.raises(TicketError):
        Ticket.join([sealed(rank) for rank in ranks])


def _packed(*fields: object) -> bytes:
    return base64.urlsafe_b64encode(msgpack.packb(list(fields)))


GOOD_RANK = [0, "unix:///x", EPOCH, bytes(16), bytes(8), bytes(32)]
REST = [0, "", "", 600]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "AAAA",
        "\u20ac" * 8,
        b"\xff" * 8,
        "A" * ((64 << 10) + 4),
        base64.urlsafe_b64encode(b"\xc1" * 9),
        base64.urlsafe_b64encode(b"\x91" * 40_000),
        base64.urlsafe_b64encode(msgpack.packb({"transfer": "x"})),
        base64.urlsafe_b64encode(msgpack.packb(msgpack.ExtType(1, b"x"))),
        base64.urlsafe_b64encode(b"\xdd\xff\xff\xff\xff"),
        base64.urlsafe_b64encode(b"\xdb\xff\xff\xff\xff"),
        _packed(TICKET_VERSION, "t", "w", "d", 1, 1, []),
        _packed(TICKET_VERSION + 1, "t", "w", "d", 1, 1, [], b"", *REST, []),
        _packed(True, "t", "w", "d", 1, 1, [], b"", *REST, []),
        _packed(1.0, "t", "w", "d", 1, 1, [], b"", *REST, []),
        _packed(TICKET_VERSION, b"t", "w", "d", 1, 1, [], b"", *REST, []),
        _packed(TICKET_VERSION, "t", "w", "d", -1, 1, [], b"", *REST, []),
        _packed(TICKET_VERSION, "t", "w", "d", 1.0, 1, [], b"", *REST, []),
        _packed(TICKET_VERSION, "t", "w", "d", True, 1, [], b"", *REST, []),
        _packed(TICKET_VERSION, "t", "w", "d", 1, 1, None, b"", *REST, []),
        _packed(TICKET_VERSION, "t", "w", "d", 1, 1, [-1], b"", *REST, []),
        _packed(TICKET_VERSION, "t", "w", "d", 1, 1, [0] * 5000, b"", *REST, []),
        _packed(TICKET_VERSION, "t", "w", "d", 1, 1, [], b"", *REST, [GOOD_RANK[:5]]),
        _packed(TICKET_VERSION, "t", "w", "d", 1, 1, [], b"", *REST, [[*GOOD_RANK[:2], b"short", *GOOD_RANK[3:]]]),
        _packed(TICKET_VERSION, "t", "w", "d", 1, 1, [], b"", *REST, [[*GOOD_RANK[:5], b"short"]]),
        _packed(TICKET_VERSION, "t", "w", "d", 1, 1, [], b"", *REST, [[*GOOD_RANK[:3], b"short", *GOOD_RANK[4:]]]),
        _packed(TICKET_VERSION, "t", "w", "d", 1, 1, [], bytes(33), *REST, []),
        _packed(TICKET_VERSION, "t", "w", "d", 1, 1, [], "", *REST, []),
        _packed(TICKET_VERSION, "t", "w", "d", 1, 1, [], b"", *REST, [[0, "x" * 300, *GOOD_RANK[2:]]]),
        _packed(TICKET_VERSION, "t", "w", "d", 1, 1, [], b"", *REST, [[-1, *GOOD_RANK[1:]]]),
        _packed(TICKET_VERSION, "t", "w", "d", 1, 1, [], b"", *REST, [GOOD_RANK, "x"]),
        # The right values, written in more bytes than needed: two texts must not mean one ticket.
        base64.urlsafe_b64encode(
            msgpack.packb([3, "t", "w", "d", 1, 1, [], b"", *REST, []]).replace(b"\x9d\x03", b"\x9d\xcc\x03")
        ),
    ],
)  # fmt: skip
def test_what_is_no_ticket_is_a_ticket_error(text):
    with pytest.raises(TicketError):
        Ticket.decode(text)


@given(st.one_of(st.binary(max_size=200), st.text(max_size=200)))
def test_noise_is_a_ticket_error(noise):
    with pytest.raises(TicketError):
        Ticket.decode(noise)


@given(st.binary(max_size=200))
def test_encoded_noise_is_a_ticket_error(noise):
    with pytest.raises(TicketError):
        Ticket.decode(base64.urlsafe_b64encode(noise))
