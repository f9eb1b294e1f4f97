"""A node in a cluster (decision 98). Needs the extra ``cluster``.

Read `membership` first: standby, election, leadership, end. Its parts: `standby_data` (environments that follow),
`snapshot_recovery` (when a member loads a snapshot) with `snapshot` (its transfer), `commit_state` (commits that wait
for etcd), `handover` (requests for it), `process` (the last writes and the next process), `clock` (the clock of expiry
times), `report`, `settings` and `state` (what members put into etcd, and the state of the cluster), `redirection` (what
a standby answers). `penstock.cluster` has the log in etcd.
"""
