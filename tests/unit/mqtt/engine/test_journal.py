"""The journal: what is recorded, what takes itself back, and who is woken."""

from __future__ import annotations

from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.model.journal import Journal, SessionRow, Stage, SubscriptionRow
from penstock.mqtt.engine.model.message import Message, message_of


def session(number: int = 1, *, awaited: bool = True) -> SessionRow:
    return SessionRow(number, "c", "", None, 5, 60, 0, None, 0, awaited)


def queue(journal: Journal, message: Message, *, packet_id: int = 0, awaited: bool = True) -> int:
    return journal.queue(1, message, 1, 0, b"", packet_id, awaited=awaited)


def test_a_batch_holds_the_last_state_of_each_key_and_the_next_begins_empty() -> None:
    journal = Journal()
    journal.session(session())
    journal.session(session()._replace(expiry_s=5))
    journal.subscribed(SubscriptionRow(1, "a", 1, False, False, b""), awaited=True)
    journal.unsubscribed(1, "a", awaited=True)
    journal.incoming(1, 9, 1, awaited=True)
    assert journal.number == 1
    batch = journal.cut(5)
    assert (batch.number, batch.wall_offset, len(batch), batch.awaited) == (1, 5, 3, True)
    assert batch.sessions == {1: session()._replace(expiry_s=5)}
    assert batch.subscriptions == {(1, "a"): None}
    assert batch.incoming == {(1, 9): 1}
    journal.incoming_done(1, 9, awaited=True)
    assert journal.number == 2
    assert journal.cut(0).incoming == {(1, 9): None}
    assert journal.waiting == 0


def test_a_delivery_that_is_done_before_the_commit_leaves_no_trace() -> None:
    journal = Journal()
    message = message_of(Publish("t", b"x", 1), 0)
    journal.done(queue(journal, message, packet_id=4), message)
    assert journal.waiting == 0
    assert journal.urgent, "whoever published it still waits for this commit"


def test_a_delivery_that_was_committed_is_taken_back_by_the_next_commit() -> None:
    journal = Journal()
    message = message_of(Publish("t", b"x", 1), 0)
    number = queue(journal, message)
    assert journal.cut(0).deliveries == {number: (1, 0, 1, 0, b"", 0, "", message)}
    journal.sent(1, number, 3, awaited=False)
    assert journal.cut(0).progress == {number: (1, 3, Stage.SENT)}
    journal.done(number, message)
    batch = journal.cut(0)
    assert (batch.deliveries, batch.progress, batch.awaited) == ({number: None}, {number: None}, False)


def test_after_pubrec_only_the_progress_stays() -> None:
    journal = Journal()
    message = message_of(Publish("t", b"x", 2), 0)
    number = queue(journal, message, packet_id=3)
    journal.cut(0)
    journal.released(1, number, 3, message, awaited=True)
    batch = journal.cut(0)
    assert (batch.deliveries, batch.progress) == ({number: None}, {number: (1, 3, Stage.RELEASED)})
    journal.done(number, None)
    batch = journal.cut(0)
    assert (batch.deliveries, batch.progress) == ({}, {number: None})


def test_a_shared_message_is_stored_once_and_goes_with_its_last_delivery() -> None:
    journal = Journal()
    message = message_of(Publish("t", b"x", 1), 0)
    message.stored = -1
    first, second = queue(journal, message), queue(journal, message)
    batch = journal.cut(0)
    (stored,) = batch.messages
    assert message.stored == stored
    assert [delivery[1] for delivery in batch.deliveries.values() if delivery] == [stored, stored]
    journal.done(first, message)
    assert journal.cut(0).messages == {}
    journal.done(second, message)
    assert journal.cut(0).messages == {stored: None}
    third = queue(journal, message)
    assert journal.waiting == 2
    journal.done(third, message)
    assert journal.waiting == 0


def test_recovered_deliveries_keep_their_progress_and_numbers() -> None:
    journal = Journal()
    journal.start_at(70)
    journal.restored(12, progressed=True)
    journal.done(12, None)
    assert journal.cut(0).progress == {12: None}
    assert journal.new_number() == 70


def test_only_what_asks_for_it_is_promised_where_nothing_else_waits() -> None:
    journal = Journal(durable_acknowledgements=False)
    plain, asked = (
        message_of(Publish("t", b"x", 1, retain=True, properties=Properties(user_properties=pairs)), 0)
        for pairs in ([("aio-persistence", "false")], [("x", ""), ("aio-persistence", "true")])
    )
    journal.retained("t", plain)
    assert (journal.awaited_changes, journal.urgent) == (0, False)
    journal.retained("t", asked)
    assert (journal.awaited_changes, journal.urgent) == (1, True)
    always = Journal()
    always.retained("t", plain)
    assert always.awaited_changes == 1
    always.retained_expired("t")
    assert always.awaited_changes == 1
    assert always.cut(0).retained == {"t": None}


def test_a_requested_deletion_of_a_retained_message_is_acknowledged_after_its_commit() -> None:
    journal = Journal(durable_acknowledgements=False)
    properties = Properties(user_properties=[("aio-persistence", "true")])
    journal.retained("t", message_of(Publish("t", b"", 1, retain=True, properties=properties), 0))
    assert (journal.awaited_changes, journal.urgent) == (1, True)
    assert journal.cut(0).retained == {"t": None}


def test_the_first_change_and_the_first_promise_wake() -> None:
    woken: list[int] = []
    journal = Journal(durable_acknowledgements=False, wake=lambda: woken.append(1))
    journal.session(session(awaited=False))
    journal.session(session(awaited=False))
    assert len(woken) == 1
    journal.session(session())
    journal.session(session())
    assert len(woken) == 2
    journal.cut(0)
    journal.session_ended(1, awaited=True)
    assert len(woken) == 3
