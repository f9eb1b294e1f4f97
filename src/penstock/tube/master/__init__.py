"""The master's shell: a listener, a timer, topics and settings on disk."""
