"""Megatron-Core as a backend: tensor-parallel layers, packed attention, weights from and to HF folders. Needs headrace[megatron]."""
