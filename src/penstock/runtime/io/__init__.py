"""Event loops, clocks, files, commits, connections and their credentials, for all parts of penstock."""
