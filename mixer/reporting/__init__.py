"""What pictures and reports share:

metrics_file    reads metrics.jsonl
figure          the style of pictures, and the curve of the loss by position
tables          Markdown
"""
