"""The state store at a broker: requests in, answers and notifications out, after the commit."""
