"""The demonstration: real telemetry the whole way, and the proof that nothing was lost or doubled."""
