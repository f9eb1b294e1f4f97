"""The demo: real telemetry end to end, and the proof that no message was lost or duplicated."""
