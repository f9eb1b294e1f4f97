"""Snapshots, pages, events and rates of the console."""
