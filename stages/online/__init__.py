"""Which session of a user's own service plays which slot."""
