"""Sessions that users' own services open over HTTP: their slots, their rewards, their ends."""
