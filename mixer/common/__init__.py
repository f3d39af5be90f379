"""What all parts use:

errors    UserError, and how a command ends with one
options   a setting with its meaning and allowed values
ranks     which process of a launch this is, and who prints
files     outputs that appear whole or not at all, locks, SHA-256
parsing   reads YAML and JSON, and names what is wrong in it
hardware  throughput, memory and precisions of the device, and what a measurement was made with
"""
