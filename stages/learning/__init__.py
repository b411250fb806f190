"""The pure tensor code: sampling, packed forward, losses, gradient steps.

Imports no other room and does no I/O: what it is given are tensors, arrays and settings.

Shape suffixes used in this room:
    B rows of a batch       T tokens of a row or of a pack     V vocabulary        D hidden size
    H query heads           K key/value heads                  G = H/K             E head size
    L cached positions      N selected (trained) tokens        R rows of a pack
"""
