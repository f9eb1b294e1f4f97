"""MQTT without IO: the engines take bytes and the time, and return bytes for each connection.

`broker` is the interface of the server. Its layers, each of which imports those before it only: `model`, `routing`,
`sessions`, `connections`. `client` is the engine of the client.
"""
