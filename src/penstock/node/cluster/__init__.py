"""A node in a cluster (decision 98). Needs the extra ``cluster``.

Read `membership` first: standby, election, leadership, end. Its parts: `clock` (the clock of expiry times), `state`
(what members put into etcd, and the state of the cluster), `redirection` (what a standby answers), `snapshot_recovery`
(when a member loads a snapshot) with `snapshot` (its transfer). `penstock.cluster` has the log in etcd.
"""
