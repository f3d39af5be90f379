"""The masked mixer, a transformers model:

modeling       the model; start reading here: MLP, block, embedding, head, loss, padding
mixing         token mixing and its variants: flat, gated, keyed; linear layers, nonlinearities
convolution    the convolutions in them, with their mixing weights
model_options  the model's options, and which of them go together
configuration  the same as transformers saves them, and the model's code beside a saved model
suffix         what followed the last time that the same tokens stood in the context
cache          generation: the inputs of earlier tokens, or their sum, and CUDA graphs
loops          what transformers' generate() and Trainer ask of the model

Every saved model gets a copy of these files, and of those of mixer/ops and mixer/common that they
import: `code_files` in configuration.py lists them. So they import nothing else from this package.
"""
