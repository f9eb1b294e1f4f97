"""What every domain's IO shell needs and no domain owns: committing, loops, listeners, configuration, logging."""
