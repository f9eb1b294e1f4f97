"""Sessions: their subscriptions, queues, deliveries and persistent state.

Read `core` first, the path of a message, then `session` and `session_manager`, their life cycle.
"""
