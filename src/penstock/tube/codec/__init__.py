"""The TubeMQ wire format as pure functions: frames, envelopes, the method table, messages, text formats.

In the order of a request: `framing`, `envelope`, `methods`, and the messages in `proto`. `message` is a stored message.
"""
