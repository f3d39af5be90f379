"""Runs the V100 kernels from PTX on a newer GPU, in place of the library that nvcc builds.

    python tests/helpers/nvrtc.py build/ptx  # needs the CUDA 12 wheels, but no GPU
    MIXER_TEST_PTX=build/ptx pytest tests/ops/test_ops_cuda.py  # on a newer GPU

The driver compiles the PTX for the GPU at hand, so the tests check what CUDA 12 made of the source.
The real library still chooses the kernels and the size of the workspace; the number of blocks of
each kernel is repeated here.
"""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

from mixer.ops.cuda import DTYPE_CODES, Params

CODES = {
    DTYPE_CODES[dtype]: name
    for dtype, name in zip(DTYPE_CODES, ("f", "6__half", "13__nv_bfloat16"), strict=True)
}


def mangled(*dtypes: int) -> str:
    """Number types as template arguments, as C++ mangles them: a class that comes again is S1_,
    counted from its namespace.
    """
    first, *rest = (CODES[dtype] for dtype in dtypes)
    return first + "".join("S1_" if code == first != "f" else code for code in rest)


def ceil_div(value: int, step: int) -> int:
    return -(-value // step)


def entry_names(text: str) -> list[str]:
    return re.findall(r"\.entry (\w+)", text)


def unique(names: list[str], part: str) -> str:
    found = [name for name in names if part in name]
    assert len(found) == 1, f"{part}: {found or 'not there'}"
    return found[0]


class PtxLibrary:
    """The library's functions that `mixer.ops.cuda` calls. launch(kernel's name, blocks, threads,
    stream, arguments).
    """

    def __init__(self, real: ctypes.CDLL, names: dict[str, list[str]], launch: Callable[..., int]):
        self.real, self.names, self.launch = real, names, launch
        self.launched: set[str] = set()

    def __getattr__(self, name: str):
        return getattr(self.real, name)

    def run(self, file: str, part: str, blocks: int, threads: int, params: Params, *more) -> int:
        name = unique(self.names[file], part)
        if blocks == 0:
            return 0
        self.launched.add(name)
        return self.launch(file, name, blocks, threads, params.stream, [params, *more])

    def mixer_pack(self, reference) -> int:
        p = reference._obj
        groups = p.heads * p.taps * p.tokens * (p.columns // 8)
        part = f"pack_kernelI{mangled(p.weight_dtype, p.dtype)}E"
        return self.run("pack", part, ceil_div(groups, 256), 256, p, ctypes.c_int64(groups))

    def mixer_forward(self, reference) -> int:
        return self.product(reference, "forward", 0)

    def mixer_grad_input(self, reference) -> int:
        return self.product(reference, "grad_input", 1)

    def product(self, reference, operation: str, transposed: int) -> int:
        p = reference._obj
        width = p.channels // p.heads
        blocks = ceil_div(p.tokens, 128) * ceil_div(p.batch * width, 128) * p.heads
        part = f"product_kernelILb{transposed}ELb{int(p.taps == 1)}E"
        return self.run(f"volta_{operation}", part, blocks, 128, p)

    def mixer_grad_weight(self, reference) -> int:
        p = reference._obj
        file, tile = "volta_grad_weight", 128
        part = f"partial_kernelILb{int(p.taps == 1)}E"
        tiles = ceil_div(p.tokens, tile) * (ceil_div(p.tokens, tile) + 1) // 2 * p.heads * p.taps
        splits = self.real.mixer_grad_weight_workspace(reference) // (tile * tile * 4) // tiles
        tokens = p.tokens if splits else 0  # nothing to sum: all zeros
        status = self.run(file, part, tiles * splits, 128, p, ctypes.c_int32(splits))
        finish = f"finish_kernelILi{tile}E{mangled(p.gradient_dtype)}E"
        blocks = p.heads * p.taps * ceil_div(p.context, tile) * ceil_div(p.context, 4096 // tile)
        status = status or self.run(
            file, finish, blocks, 256, p, ctypes.c_int32(tokens), ctypes.c_int32(splits)
        )
        if status == 0 and p.dbias:
            part = f"grad_bias_kernelI{mangled(p.dtype, p.gradient_dtype)}E"
            status = self.run("grad_bias", part, p.heads * p.context, 256, p)
        return status


class Driver:
    """Loads PTX and launches its kernels, in the context that torch uses, too."""

    def __init__(self, directory: Path, device: int):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.context, self.functions = ctypes.c_void_p(), {}
        self.must("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        self.must("cuCtxSetCurrent", self.context)
        self.modules, self.names = {}, {}
        for path in sorted(directory.glob("*.ptx")):
            module = ctypes.c_void_p()
            self.must("cuModuleLoadData", ctypes.byref(module), path.read_bytes() + b"\0")
            self.modules[path.stem], self.names[path.stem] = module, entry_names(path.read_text())
        assert self.modules, f"no PTX in {directory}: `python tests/helpers/nvrtc.py {directory}`"

    def must(self, name: str, *arguments) -> None:
        status = getattr(self.cuda, name)(*arguments)
        assert status == 0, f"{name} failed with {status}"

    def launch(
        self, file: str, name: str, blocks: int, threads: int, stream: int | None, arguments: list
    ) -> int:
        self.must("cuCtxSetCurrent", self.context)
        if name not in self.functions:
            function = ctypes.c_void_p()
            self.must(
                "cuModuleGetFunction", ctypes.byref(function), self.modules[file], name.encode()
            )
            self.functions[name] = function
        pointers = (ctypes.c_void_p * len(arguments))(
            *(ctypes.addressof(argument) for argument in arguments)
        )
        return self.cuda.cuLaunchKernel(
            self.functions[name],
            blocks,
            1,
            1,
            threads,
            1,
            1,
            0,
            ctypes.c_void_p(stream),
            pointers,
            None,
        )


def load(real: ctypes.CDLL, directory: Path, device: int) -> PtxLibrary:
    driver = Driver(directory, device)
    return PtxLibrary(real, driver.names, driver.launch)
