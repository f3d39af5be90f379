"""Compiles the CUDA kernels with the NVRTC of a CUDA 12 wheel: it supports sm_70, nvcc 13 does not.

`pip install -e ".[sm70]"` installs the wheels. Their headers are older than NVRTC, so a kernel that
uses anything newer fails to compile. The source is compiled unchanged. NVRTC takes no host code, so
the functions that launch the kernels are compiled for the device too, which instantiates every
kernel.
"""

import ctypes
import importlib.util
from pathlib import Path

import pytest

# NVRTC has no standard headers: this is what the kernels use of them.
HEADERS = {
    "stdint.h": """
        typedef signed char int8_t; typedef unsigned char uint8_t;
        typedef short int16_t; typedef unsigned short uint16_t;
        typedef int int32_t; typedef unsigned int uint32_t;
        typedef long long int64_t; typedef unsigned long long uint64_t;
        typedef unsigned long uintptr_t;""",
    "type_traits": """
        namespace std {
        template <bool, typename A, typename B> struct conditional { typedef A type; };
        template <typename A, typename B> struct conditional<false, A, B> { typedef B type; };
        template <bool condition, typename A, typename B>
        using conditional_t = typename conditional<condition, A, B>::type;
        template <bool condition> struct bool_constant { static constexpr bool value = condition; };
        }""",
}


def wheel_path(name: str) -> Path | None:
    """A path inside the nvidia wheels of CUDA 12, None where no wheel has it."""
    # a namespace package: one entry for each site-packages
    nvidia = importlib.util.find_spec("nvidia")
    folders = (nvidia.submodule_search_locations or []) if nvidia else []
    paths = (Path(folder, name) for folder in folders)
    return next((path for path in paths if path.exists()), None)


LIBRARY = wheel_path("cuda_nvrtc/lib/libnvrtc.so.12")
INCLUDE = wheel_path("cuda_runtime/include")
needs_nvrtc = pytest.mark.skipif(
    not (LIBRARY and INCLUDE), reason='no NVRTC of CUDA 12 here: pip install -e ".[sm70]"'
)


def text_list(values: list[str]) -> ctypes.Array:
    return (ctypes.c_char_p * len(values))(*(value.encode() for value in values))


def compile_source(path: Path, architecture: str) -> tuple[bytes, str]:
    """(machine code for sm_X, the log with ptxas's report)."""
    library = ctypes.CDLL(str(LIBRARY))
    program = ctypes.c_void_p()
    options = [
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        "--device-as-default-execution-space",
        "--ptxas-options=-v",
        f"--include-path={path.parent}",
        f"--include-path={INCLUDE}",
    ]
    library.nvrtcCreateProgram(
        ctypes.byref(program),
        path.read_text().encode(),
        path.name.encode(),
        len(HEADERS),
        text_list(list(HEADERS.values())),
        text_list(list(HEADERS)),
    )
    uselocale = ctypes.CDLL(None).uselocale
    uselocale.argtypes = [ctypes.c_void_p]
    uselocale.restype = ctypes.c_void_p
    locale = uselocale(None)
    status = library.nvrtcCompileProgram(program, len(options), text_list(options))
    # NVRTC leaves this thread in the "C" locale, in which Python would read files as ASCII.
    uselocale(locale)
    log = result(library, "ProgramLog", program).rstrip(b"\0").decode()
    assert status == 0, log
    binary = result(library, "CUBIN", program)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return binary, log


def result(library: ctypes.CDLL, name: str, program: ctypes.c_void_p) -> bytes:
    """What nvrtcGet<name> hands out."""
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{name}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{name}")(program, buffer)
    return buffer.raw
