"""MQTT 5.0: codec and engines without IO, and their asyncio servers and clients."""
