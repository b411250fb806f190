"""Inference servers as processes of their own: command lines, the CPU environment. Imports neither vLLM nor SGLang."""
