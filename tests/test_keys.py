"""Ticket keys: from a file, a descriptor or nothing; two active; nothing weak or open is taken."""

from __future__ import annotations

import os
import pickle

import pytest

from pdxfer.errors import MisuseError, TicketError
from pdxfer.keys import TicketKeys, key_id
from pdxfer.ticket import RankIssuer, Ticket, unseal

OLD, NEW, NEWEST = (bytes([n] * 32).hex() for n in (1, 2, 3))
EPOCH = bytes(16)


def write(path, *lines: str, mode: int = 0o600) -> str:
    path.write_text("\n".join(lines))
    path.chmod(mode)
    return str(path)


def issue(keys: TicketKeys) -> Ticket:
    issuer = RankIssuer(worker="P", layout_digest="d", rank=0, address="unix:///x", epoch=EPOCH, keys=keys)
    return issuer.issue("t", kv_tokens=1, state_tokens=1, nonce=bytes(16))


def again(keys: TicketKeys) -> TicketKeys:
    keys._looked_s = 0.0  # as if a second had passed
    return keys


def test_the_first_key_signs_and_both_verify_through_a_rotation(tmp_path):
    path = tmp_path / "keys"
    keys = TicketKeys.create(write(path, OLD))
    elsewhere = pickle.loads(pickle.dumps(keys))  # as the engine's own scheduler process gets them
    before = issue(keys)
    write(path, "# rotated", NEW, "", f"{OLD}  # until noon")
    after = issue(again(keys))
    assert (before.ranks[0].key_id, after.ranks[0].key_id) == (key_id(bytes([1] * 32)), key_id(bytes([2] * 32)))
    for ticket in (before, after, issue(again(elsewhere))):
        assert unseal(ticket, 0, EPOCH, keys.active())
    write(path, NEWEST, NEW)
    again(keys).active()
    assert unseal(after, 0, EPOCH, keys.active())
    with pytest.raises(TicketError, match="seal"):
        unseal(before, 0, EPOCH, keys.active())


@pytest.mark.parametrize(
    "lines",
    [[], ["", "# nothing"], ["abc"], [OLD[:-2]], ["zz" * 32], [OLD, NEW, NEWEST], ["\u20ac" * 64], ["0" * 70_000]],
    ids=["empty", "comments", "short", "a byte short", "no hex", "three", "no ascii", "huge"],
)
def test_a_file_without_one_or_two_whole_keys_is_refused_and_changes_nothing_later(tmp_path, lines):
    with pytest.raises(MisuseError, match=r"key|secret"):
        TicketKeys.create(write(tmp_path / "bad", *lines))
    keys = TicketKeys.create(write(tmp_path / "good", OLD))
    write(tmp_path / "good", *lines)
    assert again(keys).active() == (bytes([1] * 32),)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o644, 0o666])
def test_a_file_that_others_can_read_or_write_is_refused(tmp_path, mode):
    with pytest.raises(MisuseError, match="others can read"):
        TicketKeys.create(write(tmp_path / "keys", OLD, mode=mode))


def test_a_descriptor_is_read_and_what_is_none_is_refused(tmp_path):
    read, write_end = os.pipe()
    with os.fdopen(write_end, "w") as pipe:
        pipe.write(OLD)
    assert TicketKeys.create(f"fd:{read}").active() == (bytes([1] * 32),)
    os.close(read)
    for wrong in (f"fd:{read}", "fd:x", "fd:-1", str(tmp_path / "missing"), str(tmp_path)):
        with pytest.raises(MisuseError):
            TicketKeys.create(wrong)


def test_keys_are_random_by_default_and_never_shown():
    one, two = TicketKeys.create(), TicketKeys.create()
    assert one.active() != two.active()
    assert one.active()[0].hex() not in repr(one)
    assert str(one.active()[0]) not in repr(one)
    for weak in ((), (b"",), (bytes(31),), (bytes(32),) * 3):
        with pytest.raises(TicketError):
            TicketKeys(weak)
