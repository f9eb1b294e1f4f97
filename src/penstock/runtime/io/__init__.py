"""Event loops, clocks, files, commits, connections and their credentials: the outside world of every part."""
