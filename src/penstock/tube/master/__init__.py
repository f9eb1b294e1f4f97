"""The master server: a listener, timers, topics and settings on disk. Start with `master`."""
