"""What all parts use:

errors    UserError, how a command reports errors and exits, and which process this is
terminal  printing where the reader may go, and how quantities are printed
progress  lines that say how far something is
options   a setting with its meaning and allowed values
values    YAML files, and the shapes of the values in YAML and JSON
files     outputs that appear whole or not at all, locks, SHA-256, JSON
hardware  throughput, memory and precisions of the device, and what a measurement was made with
"""
