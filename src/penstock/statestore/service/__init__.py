"""The service of the state store: executes requests of a broker's clients, and sends answers and notifications
after the commit.

Read `service` first, then `writer` and `storage` (commits) and `delivery` (answers and notifications). `attach` serves
the clients of another broker.
"""
