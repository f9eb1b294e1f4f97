"""TubeMQ clients as state machines: requests, producers, group members, exact ranges from Apache's brokers.

Read :mod:`.request_session` first, then :mod:`.routes` (producers) or :mod:`.consumer_group`.
"""
