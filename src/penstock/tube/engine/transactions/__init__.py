"""Staged rows and the transactions that publish them; `handler` answers the requests, start there."""
