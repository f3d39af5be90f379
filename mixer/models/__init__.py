"""The models:

masked_mixer  the masked mixer; its files are copied beside every saved model
carried_code  copies them
transformer   the transformers that it is compared with
architecture  a run's model, one of these, from its configuration
"""
