"""Event loops, clocks, files, commits, connections and their credentials, for all parts of penstock.

For commits read `commit_queue` first, then `wal` with `wal_frames` and `wal_segments`, and `lmdb_environment`.
"""
