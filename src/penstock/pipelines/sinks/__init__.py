"""Write the rows of a batch to the target of a sink, once or idempotently.

Read `delivery` first: it has an entry for each kind of sink, whose writes are in the module of the kind.
"""
