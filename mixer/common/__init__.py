"""What all parts use:

errors       UserError, and how a command ends with one
options      a setting with its meaning and allowed values
ranks        which process of a launch this is
say          how functions tell people something
file_systems what a file system may lack
files        outputs that appear whole or not at all
locks        between processes
checksums    SHA-256 of files
json_file    reads JSON, and names what is wrong in it
yaml_file    reads YAML in the same way
hardware     peak throughput, memory used, precisions
memory       errors for want of memory
provenance   where a measurement comes from
"""
