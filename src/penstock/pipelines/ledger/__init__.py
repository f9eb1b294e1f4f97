"""Accounts of a run: the ledger of each batch, reconciliation with the log, dead letters, effects of a changed file."""
