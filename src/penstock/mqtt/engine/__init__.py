"""MQTT 5.0 without IO: bytes and ``now`` in, bytes with an address out."""
