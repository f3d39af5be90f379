"""What a trained model has learned:

matrices        measures of its mixing matrices
reconstruction  how much of a text can be read back from a layer's output
"""
