"""The masked mixer, a model of transformers:

modeling       the model, from which to read on: MLP, block, embedding, head, loss
mixing         token mixing and its variants: flat, gated, keyed
convolution    the convolutions in them, with their mixing weights
layers         linear layers and nonlinearities
configuration  the model's options, and its code beside a saved model
cache          generation: the inputs of earlier tokens, or their sum, and CUDA graphs
padding        padded batches, and what transformers' Trainer counts in them

These files are copied beside every saved model with the files of mixer/ops and mixer/common that
they import, so they import nothing else of this package.
"""
