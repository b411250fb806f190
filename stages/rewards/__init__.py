"""From a session's recorded calls and an episode's rewards to training rows."""
