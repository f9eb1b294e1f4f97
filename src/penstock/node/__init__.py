"""`penstock up`: every part of penstock in one process, under one configuration and one data directory.

Read `node` first: it creates the parts, and starts and stops them in order. `config` has the configuration, `cluster` a
node in a cluster, `http`, `api` and `web` the HTTP listener, `rules` and `capture` what is copied to TubeMQ.
"""
