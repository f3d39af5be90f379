"""Several processes. One file, `world`, has all of it: what launched them, messages between them,
and how they end.
"""
