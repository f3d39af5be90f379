"""The models:

masked_mixer  the masked mixer; transformers copies its files beside every saved model
transformer   the transformers that it is compared with
retrieval     texts as vectors, for either
architecture  a run's model, one of these, from its configuration
"""
