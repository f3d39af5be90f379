"""Optimizers; mixer/training/optim.py says which one trains what:

muon              the matrices of linear layers
triangular_adamw  mixing weights, and their shared lags
chained           several optimizers as one
"""
