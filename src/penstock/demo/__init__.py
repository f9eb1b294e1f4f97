"""The demo: sends real telemetry through all parts, and proves that no message was lost or duplicated."""
