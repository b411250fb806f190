"""What each wire protocol says, and nothing else: bodies to `Call`, events and answers back to bodies and stream events."""
