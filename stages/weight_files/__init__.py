"""Weights on disk: where versions lie, what a safetensors file says of itself. Shared by the trainer and the broadcast."""
