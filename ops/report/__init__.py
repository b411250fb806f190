"""`headrace report`: a run or a recording as one HTML file that needs no network.

`gather` reads the log once into plain figures, `charts` draws, `page` writes: the last two are pure.
"""
