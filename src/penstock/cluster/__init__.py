"""A write-ahead log in etcd, which survives its node (decision 98). Optional: ``pip install 'penstock[cluster]'``.

Read `log` first, then `commit` (the meaning of etcd's answers), `leadership` with `lease`, `retention`, `standby` with
`follow`, and `client`. No node uses it yet.
"""
