"""Transactions: staged rows and their publication. `handler` answers the requests; start there."""
