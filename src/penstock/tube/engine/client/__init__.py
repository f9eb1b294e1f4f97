"""TubeMQ clients as state machines: requests, producers, group members, exact ranges from Apache's brokers.

Read :mod:`.request_session` first, then :mod:`.producer_state` or :mod:`.consumer_state`.
"""
