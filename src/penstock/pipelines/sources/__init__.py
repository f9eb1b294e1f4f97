"""Read records as streams, read any range of them again, count them, and report the lag."""
