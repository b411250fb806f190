"""Arena launch: an episode asked for becomes a task in the Arena, watched to its one terminal result."""
