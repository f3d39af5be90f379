"""The models:

masked_mixer  the masked mixer; transformers copies its files beside every saved model
architecture  a run's model, one of these or a transformer to compare with
retrieval     text embeddings, for either
"""
