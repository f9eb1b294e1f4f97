"""Accounting: the ledger of all batches, reconciliation with the log, dead letters, effects of a changed file."""
