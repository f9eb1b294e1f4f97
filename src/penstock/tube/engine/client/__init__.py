"""Clients of the tube as state machines: producers, consumer group members, exact ranges of Apache's brokers."""
