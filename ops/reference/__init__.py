"""The pages of docs/ that are made from the code: commands, settings, messages, metrics. `python -m ops.reference` writes them."""
