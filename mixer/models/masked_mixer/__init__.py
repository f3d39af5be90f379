"""The masked mixer, a model of transformers:

configuration  its options
modeling       the model: embedding, blocks, head, loss
mixing         token mixing and its variants
convolution    the convolutions in them, with their mixing weights
by_lag         mixing weights with one number for each distance of tokens
recurrent      mixing weights that are a running sum
attention      queries and keys, and attention
operators      what convolutions call: with kernels where this package is installed
linear, gelu   layers in the forms that training needs
generation     what generate() needs
trainer        what transformers' Trainer needs
cache, memory  the inputs of earlier tokens or their sum, kept while a text is generated
captured_step  a decoding step as a CUDA graph

These files are copied beside every saved model, so their imports are relative. plain, lags and
options only pass on files of mixer/ops and mixer/common, which saved models have in their place.
"""
