"""Optimizers; mixer/training/optim.py says which one trains what:

muon              the matrices of linear layers
newton_schulz     Muon's orthogonalization
triangular_adamw  mixing weights
shared_lags       mixing weights that also learn as a Toeplitz matrix would
chained           several optimizers as one
"""
