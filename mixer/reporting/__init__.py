"""What pictures and reports share:

text      reads metrics.jsonl, writes Markdown
figure    the style of pictures, and the curve of the loss by position
curves    the losses of runs
"""
