"""MQTT 5.0: a pure codec and pure engines, and asyncio shells over them."""
