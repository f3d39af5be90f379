"""What all parts use:

ranks     which process of a launch this is
errors    UserError, and how a command is called, reports errors and exits
terminal  printing where the reader may go, and how quantities are printed
progress  lines that say how far something is
options   a setting with its meaning and allowed values
values    YAML files, and the shapes of the values in YAML and JSON
files     outputs that appear whole or not at all, locks, SHA-256, JSON
hardware  throughput, memory and precisions of the device, and what a measurement was made with
"""
