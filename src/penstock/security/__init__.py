"""Authentication and authorization: passwords, certificates, tokens, policies. No IO except files."""
