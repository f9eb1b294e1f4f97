"""The state store's requests and answers as bytes and as data: RESP3, the command table, the dialects. Pure."""
