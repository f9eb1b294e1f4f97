"""Read records as streams, reread any range, count records, and report the lag."""
