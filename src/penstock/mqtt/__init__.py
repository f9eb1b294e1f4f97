"""MQTT 5.0 and 3.1.1: codec and engines without IO, and their asyncio servers and clients.

Read `server` first: it connects the listeners of `transport` with the broker in `engine`. `service` is the interface of
the state store and the rules, `listener_access` authenticates and authorizes, `password_checks` computes hashes in
threads, `persistence` and `storage` have sessions and retained messages on disk. `client` is the asyncio client.
"""
