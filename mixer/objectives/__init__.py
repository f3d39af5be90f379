"""What a run learns. An objective has its samples, its loss, its validation, and what a saved model
gets:

config        which objectives there are, their options, and what these must not be
objective     what all of them have in common, and the one of a run
language      the next token of a text
tasks         the answers in samples of random tokens, made on demand
retrieval     which two texts belong together
"""
