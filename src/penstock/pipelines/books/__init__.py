"""What became of every record: ledger, dead letters, and whether the sums hold."""
