"""Where rows go: tables, Delta, messages; each batch once, or honest about what it is."""
