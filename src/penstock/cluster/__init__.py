"""A write-ahead log in etcd, so that commits survive the loss of their node (decision 98). Optional: extra ``cluster``.

Read `log` first, then `commit` (the meaning of etcd's answers), `leadership` with `lease`, `retention`, `standby` with
`follow` and `watch`, and `client`. `penstock.node.cluster` uses it.
"""
