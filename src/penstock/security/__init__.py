"""Who a client is and what it may do: passwords, certificates, tokens, policies. Everything here is pure or a file."""
