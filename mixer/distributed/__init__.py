"""Several processes: `launcher` has what started them, `world` messages between them, and how they
end.
"""
