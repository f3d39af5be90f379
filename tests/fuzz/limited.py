"""limited.py BYTES -m MODULE ...: runs a command that can write no file beyond so many bytes, as on
a disk that is full.
"""

import resource
import runpy
import signal
import sys

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write then fails as on a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
module = sys.argv[3]
sys.argv = sys.argv[3:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
