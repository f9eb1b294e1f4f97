"""The TubeMQ wire format as pure functions: frames, envelopes, the method table, messages, text formats."""
