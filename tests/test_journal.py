"""The journal: what an agent remembers of its transfers, well and not, and that it stays small."""

from __future__ import annotations

from contextlib import suppress

import pytest

from pdxfer.agent.journal import Journal, component_kind
from pdxfer.builders import Parallel
from pdxfer.errors import CorruptError, DeadlineError, PeerError, StaleError
from pdxfer.testing.faults import Fault
from tests.pairs import LONG, SCHEMES, Ends, fails, hand_over, pair
from tests.test_agent_damage import damaged
from tests.workers import layouts


def stages(timeline) -> list[str]:
    return [stage for _, stage, _ in timeline.marks]


def test_a_hand_over_leaves_timelines_at_both_ends():
    with pair(*layouts(Parallel(tp=2), Parallel(tp=1)), mode="packed") as (source, target):
        received = hand_over(source, target, "one")
        (fetch,) = target.agents[0].journal.timelines()
        assert stages(fetch) == [
            "planned", "opened", "moved", "opened", "moved", "all_in", "completed", "handed", "released",
        ] or sorted(stages(fetch)) == sorted(
            ["planned", "all_in", "completed", "handed", "released", *["opened", "moved"] * 2]
        )  # fmt: skip
        (offer,) = source.agents[0].journal.timelines()
        assert stages(offer) == ["opened", "read", "completed"]
        assert (fetch.peer, offer.peer, fetch.transport, offer.transport) == ("P", "D", "memory", "memory")
        sent = sum(sum(a.journal.timelines()[0].nbytes.values()) for a in source.agents)
        assert sent == sum(fetch.nbytes.values()) == sum(e.payload_bytes for r in received for e in r.edges)
        counts = target.agents[0].journal.counts
        assert counts[("transfers", "memory", "target", "completed")] == 1
        assert counts[("transfer_bytes", "memory", "kv", "in")] > 0
        assert fetch.to_json()["seconds"]["total"] > 0


def test_relays_have_timelines_too():
    with pair(*layouts(Parallel(tp=1), Parallel(tp=2))) as (source, target):
        hand_over(source, target, "one")
        roles = {t.role for agent in target.agents for t in agent.journal.timelines()}
        assert roles == {"target", "relay"}
        counts = [agent.journal.counts for agent in target.agents]
        assert sum(c[("transfers", "memory", "relay", "completed")] for c in counts) >= 1


def test_a_failure_says_what_failed_where_and_what_to_do():
    with damaged("packed", Fault(kind="corrupt", at=0, on="payload")) as (source, target, _):
        error = fails(source, target, CorruptError, match="digest")
        (fetch,) = target.agents[0].journal.timelines()
        failure = fetch.to_json()["failure"]
        assert failure["reason"] == "CORRUPT"
        assert failure["component"] == error.component
        assert failure["in"].startswith("source rank ")
        assert failure["blame"] == "bytes"
        assert failure["remedy"]
        counts = target.agents[0].journal.counts
        assert counts[("integrity_failures", component_kind(error.component), "memory")] == 1
        assert counts[("transfer_failures", "target", "CORRUPT")] == 1


def test_a_silent_source_is_seen_as_down_and_up_again():
    with damaged("packed", Fault(kind="drop", at=0)) as (source, target, faulty):
        fails(source, target, DeadlineError, timeout_s=0.5)
        assert not target.agents[0].journal.peers["P"].up
        faulty.plan = type(faulty.plan).of()
        hand_over(source, target, "again")
        seen = target.agents[0].journal.peers["P"]
        assert (seen.up, seen.completed, seen.failed) == (True, 1, 1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_leases_that_run_out_and_late_tickets_are_counted_once(scheme):
    with pair(*layouts(Parallel(), Parallel()), transports=(scheme,), of_source={"lease_s": 0.2}) as (source, target):
        ends = Ends()
        ticket = source.offer("late", LONG, on_end=ends)
        ends.wait(1)
        target.reserve("late", LONG)
        with pytest.raises(StaleError):
            target.fetch(ticket, "late")
        counts = source.agents[0].journal.counts
        assert counts[("leases_expired",)] == 1
        assert {key: n for key, n in counts.items() if key[0] == "stale_rejected"} == {
            ("stale_rejected", "TRANSFER_ENDED"): 1
        }
        assert source.agents[0].journal.timelines()[0].to_json()["outcome"] == "expired"


def test_a_peer_s_words_make_no_label():
    journal = Journal()
    for number in range(1000):
        timeline = journal.begin("target", f"t{number}", peer=f"worker-{number}")
        error = PeerError("x" * 10_000, reason=f"MADE_UP_{number}")
        journal.end(timeline, "failed", error=error)
        with suppress(StaleError), journal.judging():
            raise StaleError("x", reason=f"MADE_UP_{number}")
        journal.end(timeline, "completed")  # the second end counts for nothing
    assert len(journal.counts) < 40
    assert len(journal.peers) == 256
    assert len(journal.timelines()) == 512
    assert len(journal.timelines()[0].error) == 500
    assert journal.counts[("transfers", "none", "target", "failed")] == 1000
    assert journal.counts[("peer_transfers", "other", "other")] == 1000 - 16


def test_a_listener_that_fails_ends_nothing(caplog):
    class Broken:
        def began(self, timeline):
            raise RuntimeError("began")

        def ended(self, timeline):
            raise RuntimeError("ended")

    journal = Journal()
    journal.listeners.append(Broken())
    journal.end(journal.begin("source", "one"), "completed")
    assert journal.counts[("telemetry_dropped",)] == 2
    assert journal.counts[("transfers", "none", "source", "completed")] == 1
