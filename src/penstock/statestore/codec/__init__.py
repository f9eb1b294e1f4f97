"""Encoding and decoding of state store requests and answers: RESP3, command table, dialects. No I/O."""
