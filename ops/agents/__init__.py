"""Episodes without an Arena: the user's own agents, or a verifiers environment, in processes that end with their worker."""
