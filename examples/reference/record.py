# Produce a record with all fields, and decode it in a consumer.
import os

from penstock.tube import Record
from penstock.tube.blocking import Consumer, Producer

MASTER = os.environ.get("PENSTOCK_TUBE_MASTER", "127.0.0.1:8715")

record = Record(
    b'{"celsius": 61.5}',  # the value: the body of the message, unchanged
    key=b"press-1",  # equal keys are stored in one partition
    msg_type="celsius",  # consumers and Spark filter by it
    content_type="application/json",
    event_time_ms=1_696_374_425_000,  # time of the event
    id="press-1/17",  # equal in every copy: removes duplicates
    headers=[("unit", "C")],  # user properties
)
with Producer(MASTER) as producer:
    producer.send("readings", record)
with Consumer(MASTER, "reference", ["readings"]) as consumer:
    message = consumer.poll(10)
assert message is not None
assert (message.record.id, message.record.headers) == ("press-1/17", [("unit", "C")])
