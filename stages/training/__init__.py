"""The training step: manifests in, weights out, exactly once."""
