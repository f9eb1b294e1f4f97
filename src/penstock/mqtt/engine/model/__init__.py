"""Data that all parts of the engine share: messages, limits, access decisions, the journal, timers, statistics."""
