"""Network connections of the broker: handshake, acknowledgements, backpressure, output.

Read `connection` first, which dispatches packets, then `publish` and `output`; `connection_state` has what they share.
"""
