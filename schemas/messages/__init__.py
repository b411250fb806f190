"""The messages of the loop, a module per part of the flow."""
