"""Several processes: `world` has what launched them, messages between them, and how they end."""
