"""Cases beside a pipeline file: input records and what each sink must get, tried without any broker."""
