"""What all parts use:

errors    UserError, how a command reports errors and exits, and which process this is
options   a setting with its meaning and allowed values
files     outputs that appear whole or not at all, locks, SHA-256, JSON
hardware  throughput, memory and precisions of the device, and what a measurement was made with
"""
