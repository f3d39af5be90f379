"""The models:

masked_mixer   the masked mixer; transformers copies its files beside every saved model
shifted_qwen3  a transformer to compare it with, which transformers lacks
auto           both for transformers' Auto classes, and others that a package may have
config         the section `model` of a run's configuration
architecture   a run's model, one of these or any other of transformers, and its parts
"""
