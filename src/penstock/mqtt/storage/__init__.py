"""Sessions and retained messages on disk."""
