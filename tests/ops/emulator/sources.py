"""Makes programs for the CPU of the kernels' own source, with calls to an emulator in place of PTX,
launches and shared memory.

What is new to the emulator fails, by name, instead of being emulated wrongly.
"""

import re
import subprocess
from pathlib import Path

from mixer.ops import build

HERE = Path(__file__).parent
# Blocks with dynamic shared memory come in clusters of two.
LAUNCH = r"kernel<<<static_cast<unsigned>\(blocks\), threads, bytes, stream>>>\(arguments\.\.\.\);"
LAUNCHED = "emulator::launch(blocks, threads, [&] { kernel(arguments...); }, bytes > 0 ? 2 : 1);"
FLAGS = ["-Xcompiler=-fPIC,-fno-strict-aliasing,-Wno-psabi", "-std=c++17", "-O2", "-w"]
FLAGS += ["-U_FORTIFY_SOURCE", f"-I{HERE}"]

Replacements = list[tuple[str, str]]  # patterns, and what stands for them


def ptx(start: str, does: str) -> tuple[str, str]:
    """Replaces each asm statement that begins so."""
    return rf'asm(?: volatile)?\(\s*"{start}.*?\);', does


def emulated(unit: Path, replacements: Replacements) -> str:
    """The file `unit` and what it includes as one, each pattern replaced where it is: at least
    once.
    """
    seen = set()
    lines = []

    def add(name: str) -> None:
        if name in seen:
            return
        seen.add(name)
        for line in (unit.parent / name).read_text().splitlines():
            include = re.match(r'#include "(.*)"', line)
            if include:
                add(include[1])
            elif not line.startswith("#pragma once"):
                lines.append(line)

    add(unit.name)
    text = "\n".join(lines) + "\n"
    text = re.sub(r"(?<!\.)\b(block|grid)Dim\.x", r"emulator::\1_size.x", text)
    for pattern, replacement in [*replacements, (LAUNCH, LAUNCHED)]:
        text, count = re.subn(pattern, replacement, text, flags=re.DOTALL)
        assert count > 0, f"{pattern} is nowhere: the emulator knows the kernels no longer"
    new = re.search(r"^.*(\basm\b|<<<|__shared__).*$", text, flags=re.MULTILINE)
    if new:
        raise AssertionError(f"new to the emulator: {new[0]}")
    return text


def compile_unit(name: str, header: str, text: str, directory: Path, *flags: str) -> Path:
    """The object of a unit with the header of its emulator."""
    unit = directory / f"{name}.cpp"
    unit.write_text(f'#include "{header}.h"\n{text}')
    nvcc(*FLAGS, *flags, "-c", unit, "-o", unit.with_suffix(".o"))
    return unit.with_suffix(".o")


def link(objects: list[Path], directory: Path) -> Path:
    """The library, for `emulated_cases.py`. Nothing calls the CUDA runtime."""
    nvcc("-shared", "-cudart=none", *objects, "-o", directory / "kernels.so")
    return directory / "kernels.so"


def nvcc(*arguments) -> None:
    """For C++ it is g++ with CUDA's headers."""
    command = [str(build.find_nvcc()), *map(str, arguments)]
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.returncode == 0, process.stdout


def exports(architecture: str) -> str:
    """What ends the unit with the sets of an architecture."""
    dtype = "dtype" if architecture == "ampere" else ""
    chosen = f"KernelSet kernels(int dtype) {{ return {architecture}_kernels({dtype}); }}"
    return f'{chosen}\n#include "library.h"\n'


# ------------------------------------------------------------------------- Volta and Ampere

TENSOR = [
    (
        r"alignas\(128\) __shared__ unsigned char memory\[[\w:]+\];",
        "auto memory = reinterpret_cast<unsigned char*>(emulator::own_block().shared);",
    ),
    ptx(r"mov\.u32 %0, %%laneid", "lane = threadIdx.x % 32;"),
]
AMPERE = [
    *TENSOR,
    ptx(r"cp\.async\.cg", "(void)bytes; emulator::copy_async(shared, global, valid);"),
    ptx(r"cp\.async\.commit_group", "emulator::commit_copies();"),
    ptx(r"cp\.async\.wait_group", "emulator::wait_copies(kPending);"),
    ptx(r"ldmatrix\S*x4\.shared", "emulator::load_matrices(shared, f.part, false);"),
    ptx(r"ldmatrix\S*x4\.trans", "emulator::load_matrices(shared, f.part, true);"),
    ptx(r"mma\.sync", "emulator::mma<Element>(sum, left.part, right0, right1);"),
    (r"__cvta_generic_to_shared\(pointer\)", "emulator::shared_address(pointer)"),
]
VOLTA = [*TENSOR, (r"asm\(.*?\)\);", "emulator::mma(sum, left, right, layouts);")]


def tensor_library(name: str, directory: Path, mistake: tuple[str, str] = ("", "")) -> Path:
    """The library of Volta's or Ampere's kernels, with part of their source replaced."""
    text = emulated(build.SOURCES / f"{name}.cu", AMPERE if name == "ampere" else VOLTA)
    assert not mistake[0] or text.count(mistake[0]) == 1
    text = text.replace(*mistake) + exports(name)
    return link([compile_unit(name, name, text, directory)], directory)


# ------------------------------------------------------------------------- Hopper

LOAD = "emulator::load_box(shared_address(box), map, shared_address(barrier)"
WGMMA = "(type) emulator::wgmma(sum, {%s, type[0] == 'f', %s, accumulate != 0, left, right})"
HOPPER = [
    (r"extern __shared__ char (\w+)\[\];", r"char* \1 = emulator::dynamic_shared();"),
    (r"__cvta_generic_to_shared\(pointer\)", "emulator::shared_address(pointer)"),
    ptx(r"mov\.u32 %0, %%cluster_ctarank", "rank = emulator::cluster_rank();"),
    ptx(r"barrier\.cluster\.arrive", "emulator::cluster_sync();"),
    ptx(r"bar\.sync", "emulator::warpgroup_sync(warpgroup);"),
    ptx(r"mbarrier\.init", "emulator::barrier_init(shared_address(barrier), arrivals);"),
    ptx(r"fence\.mbarrier_init", ""),
    ptx(
        r"mbarrier\.arrive\.shared::cta",
        "emulator::barrier_arrive(shared_address(barrier), arrivals, 0);",
    ),
    ptx(
        r"mbarrier\.arrive\.expect_tx",
        "emulator::barrier_arrive(shared_address(barrier), 1, bytes);",
    ),
    ptx(r"\{\\n\.reg \.b32 remote", "emulator::barrier_arrive_at(shared_address(barrier), rank);"),
    ptx(r"\{\\n\.reg \.pred done", "emulator::barrier_wait(shared_address(barrier), parity);"),
    ptx(r"prefetch\.tensormap", "emulator::map_of(map);"),
    ptx(r"cp\.async\.bulk\.tensor\.4d\.shared", f"{LOAD}, kForAll, channel, head, token, sample);"),
    ptx(r"cp\.async\.bulk\.tensor\.3d\.shared", f"{LOAD}, false, column, row, matrix);"),
    ptx(
        r"cp\.async\.bulk\.tensor\.4d\.global",
        "emulator::store_box(map, shared_address(box), channel, head, token, sample);",
    ),
    ptx(r"cp\.async\.bulk\.commit_group", "emulator::commit_stores();"),
    ptx(r"cp\.async\.bulk\.wait_group", "emulator::wait_stores_read(kPending);"),
    ptx(r"fence\.proxy\.async", "emulator::fence_async_proxy();"),
    ptx(r"setmaxnreg", ""),
    ptx(r"wgmma\.fence", "emulator::wgmma_fence();"),
    ptx(r"wgmma\.commit_group", "emulator::wgmma_commit();"),
    ptx(r"wgmma\.wait_group", "emulator::wgmma_wait(kPending);"),
    (r'asm volatile\("" : "\+f"[^;]*;', ";"),  # pin
    (
        r'(#define MIXER_WGMMA_N128)\(type\).*?"n"\(kRightTransposed\)\)',
        rf"\1{WGMMA % (128, 'kLeftTransposed, kRightTransposed')}",
    ),
    (
        r'(#define MIXER_WGMMA_N8)\(type\).*?"r"\(accumulate\)\)',
        rf"\1{WGMMA % (8, 'false, false')}",
    ),
    ptx(r"stmatrix", "emulator::stmatrix(address, value);"),
    ptx(r"ldmatrix", "emulator::ldmatrix(address, value);"),
]


def hopper_unit(name: str, sources: Path, directory: Path) -> Path:
    """The object of one of Hopper's files; grad_weight's has the library's functions."""
    text = emulated(sources / f"{name}.cu", HOPPER)
    if name == "hopper_grad_weight":
        assert text.count("kRoundBytes = 24 << 20") == 1
        text = text.replace("kRoundBytes = 24 << 20", "kRoundBytes = 16 << 10")  # several rounds
        text += exports("hopper")
    return compile_unit(name, "hopper", text, directory)
