"""Several processes: `launcher` has what started them, `world` messages between them and how they
end, `shards` a model that is cut up among them.
"""
