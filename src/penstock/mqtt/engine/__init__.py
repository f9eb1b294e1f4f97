"""MQTT 5.0 without IO: the engines take bytes and the time, and return bytes for each connection."""
