"""Where records come from: streams for the queries, any batch of them again, counts and lag."""
