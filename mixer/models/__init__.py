"""The models:

masked_mixer  the masked mixer; its files are copied beside every saved model
carried_code  copies them
llama         the transformer that it is compared with
architecture  a run's model, one of the two, from its configuration
"""
