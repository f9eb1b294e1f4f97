"""A write-ahead log in front of an LMDB environment."""
