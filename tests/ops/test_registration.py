"""What `operator` promises beyond torch's own custom operators."""

import subprocess
import sys

OPERATOR = """
import ctypes, sys, torch
from mixer.ops.registration import operator

@operator("test::copied")
def copied(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    ctypes.memmove(y.data_ptr(), x.data_ptr(), x.numel() * x.element_size())
    return y

torch.library.register_fake("test::copied")(torch.empty_like)
torch.library.register_autograd("test::copied", lambda ctx, dy: 2 * dy)
x = torch.randn(4, requires_grad=True)
copied(x).sum().backward()
assert torch.equal(x.grad, torch.full((4,), 2.0))
assert "torch._dynamo" not in sys.modules

from torch._dynamo.utils import counters

def each(x):
    yield copied(x)

@torch.compile(backend="eager")
def function(x):
    try:
        print("the compiler gives this function up")
        return next(each(x))
    finally:
        pass

assert torch.equal(function(x.detach()), x)
for size in range(1, 12):
    function(torch.randn(size, dtype=torch.float64))
print(*counters["graph_break"])
"""


def test_a_first_call_imports_no_compiler_and_no_compiler_looks_into_it_later():
    done = subprocess.run([sys.executable, "-c", OPERATOR], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "gives this function up" in done.stdout
    assert "CFunctionType" not in done.stdout  # memmove, in whose place a kernel's call stands
    assert "recompile_limit" not in done.stderr
