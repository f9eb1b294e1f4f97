"""The TubeMQ wire as pure functions: frames, envelopes, the method table, messages, string formats."""
