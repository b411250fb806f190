"""The policy's folder on disk: its tokenizer, a tiny model to begin with, and a supervised warm-up.

Knows files and transformers; knows no engine, no trainer and no message.
"""
