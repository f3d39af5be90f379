"""The masked mixer, a model of transformers:

configuration  its options, and its code beside a saved model
modeling       the model: embedding, blocks, head, loss
layers         linear layers and the MLP
mixing         token mixing and its variants: flat, gated, keyed
convolution    the convolutions in them, with their mixing weights
recurrent      mixing weights that are a running sum
operators      what convolutions call: with kernels where this package is installed
padding        padded batches, and what transformers' Trainer counts in them
cache          what generate() needs: the inputs of earlier tokens or their sum, and CUDA graphs

These files are copied beside every saved model with the files of mixer/ops and mixer/common that
they import, so they import nothing else of this package.
"""
