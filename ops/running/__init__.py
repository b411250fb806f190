"""`headrace run`: everything of a run on one machine, from one command to its summary."""
