"""Optimizers; mixer/training/optim.py says which one trains what:

updates  Muon, for the matrices of linear layers, and AdamW for mixing weights and their lags
chained  several optimizers as one; the norm of its gradients, clipping, and skipped steps
"""
