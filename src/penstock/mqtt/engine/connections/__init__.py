"""Network connections of the broker: handshake, acknowledgements, backpressure, output."""
