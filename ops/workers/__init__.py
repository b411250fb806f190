"""The processes of a run: each runs one or several stages until told to drain."""
