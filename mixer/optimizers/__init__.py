"""Optimizers; mixer/training/optim.py says which one trains what:

muon         the matrices of linear layers
shared_lags  AdamW for mixing weights that also learn as their lags
chained      several optimizers as one; the norm of its gradients, clipping, and skipped steps
"""
