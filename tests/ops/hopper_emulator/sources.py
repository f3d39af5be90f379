"""Makes the emulated sources: the Hopper kernels' source with PTX and launches replaced by calls to
the emulator.

Every replacement is checked. A kernel that uses an instruction unknown to the emulator fails here
with its name, instead of being emulated wrongly.
"""

import re
from pathlib import Path

FILES = [
    "params.h",
    "numeric.cuh",
    "triangle.cuh",
    "lags.cuh",
    "kernels.h",
    "hopper_maps.h",
    "hopper_ptx.cuh",
    "hopper_tile.cuh",
    "hopper_product.cuh",
    "hopper_forward.cu",
    "hopper_grad_input.cu",
    "hopper_grad_weight.cu",
]
# the product's, grad_weight's, and those of the sums over its splits and over pieces of diagonals
LAUNCHES = 4

BOX = "emulator::load_box(shared_address(box), map, shared_address(barrier)"
IS_HALF = "std::is_same<Element, __half>::value"

# What each function of hopper_ptx.cuh that holds PTX does instead.
BODIES = {
    "cluster_rank": "return emulator::cluster_rank();",
    "cluster_sync": "emulator::cluster_sync();",
    "warpgroup_sync": "emulator::named_barrier(warpgroup + 1, kWarpgroup);",
    "barrier_init": "emulator::barrier_init(shared_address(barrier), arrivals);",
    "barrier_init_fence": "",
    "barrier_arrive": "emulator::barrier_arrive(shared_address(barrier), arrivals);",
    "barrier_arrive_expect": "emulator::barrier_arrive_expect(shared_address(barrier), bytes);",
    "barrier_arrive_at": "emulator::barrier_arrive_at(barrier, rank);",
    "barrier_wait": "emulator::barrier_wait(barrier, parity);",
    "prefetch_map": "emulator::check_map(map);",
    "load_box": f"{BOX}, false, 4, channel, head, token, sample);",
    "load_box_for_all": f"{BOX}, true, 4, channel, head, token, sample);",
    "load_weight": f"{BOX}, false, 3, column, row, matrix, 0);",
    "store_box": "emulator::store_box(map, shared_address(box), channel, head, token, sample);",
    "commit_stores": "emulator::commit_stores();",
    "wait_stores_read": "emulator::wait_stores_read(kPending);",
    "fence_async_proxy": "emulator::fence_async_proxy();",
    "give_registers": "",
    "take_registers": "",
    "wgmma_fence": "emulator::wgmma_fence();",
    "wgmma_commit": "emulator::wgmma_commit();",
    "wgmma_wait": "emulator::wgmma_wait(kPending);",
    "pin": "",
    "wgmma_n128": (
        f"emulator::wgmma(sum, 128, {IS_HALF}, kLeftTransposed, kRightTransposed, "
        "left, right, accumulate);"
    ),
    "wgmma_n8": f"emulator::wgmma(sum, 8, {IS_HALF}, false, false, left, right, accumulate);",
    "store_fragments": "emulator::stmatrix(address, value);",
    "load_fragments": "emulator::ldmatrix(address, value);",
}


class EmulatorError(Exception):
    """The sources hold something that the emulator does not know; the message says what."""


def make(sources: Path, directory: Path) -> list[Path]:
    """Writes the emulated sources into `directory`; returns those to compile, X.cpp for each
    X.cu.
    """
    directory.mkdir(parents=True, exist_ok=True)
    units, launches = [], 0
    for name in FILES:
        text = (sources / name).read_text()
        if name == "hopper_ptx.cuh":
            text = replace_ptx(text)
        text, count = replace_launches(text)
        launches += count
        text = text.replace("kRoundBytes = 24 << 20", "kRoundBytes = 16 << 10")  # several rounds
        text = re.sub(
            r"extern __shared__ char (\w+)\[\];", r"char* \1 = emulator::dynamic_shared();", text
        )
        for left in ("<<<", "__shared__"):
            if left in text:
                raise EmulatorError(f"{name}: a {left} in a form that the emulator does not know")
        path = directory / name
        if path.suffix == ".cu":
            path = path.with_suffix(".cpp")
            units.append(path)
        path.write_text(f'#include "emulator.h"\n#line 1 "{name}"\n{text}')
    if launches != LAUNCHES:
        raise EmulatorError(f"{launches} kernel launches; the emulator knows {LAUNCHES}")
    return units


def replace_launches(text: str) -> tuple[str, int]:
    """kernel<<<blocks, threads, bytes, stream>>>(arguments); calls the emulator. Also says how many
    there were.
    """
    launch = r"(\w+(?:<[^;{}]*?>)?)\s*<<<([^;]*?), (\w+), (\w+),\s*[^;]*?>>>\(\s*([^;]*?)\);"
    return re.subn(launch, r"emulator::launch(\2, \3, \4, [&] { \1(\5); });", text)


def replace_ptx(text: str) -> str:
    """Puts BODIES into the functions that hold PTX."""
    parts, done, replaced = [], 0, set()
    for function in re.finditer(r"__device__ __forceinline__ [^;{]*?(\w+)\(([^{;]*)\) \{", text):
        end = end_of_body(text, function.end())
        body = text[function.end() : end]
        if "asm" not in body and "MIXER_WGMMA" not in body:
            continue
        name = function[1]
        if name not in BODIES:
            raise EmulatorError(
                f"hopper_ptx.cuh: {name} is new to the emulator; say in BODIES what it does"
            )
        parts += [text[done : function.end()], f" {BODIES[name]} "]
        done = end
        replaced.add(name)
    if unused := set(BODIES) - replaced:
        raise EmulatorError(f"hopper_ptx.cuh no longer has {', '.join(sorted(unused))}")
    text = "".join([*parts, text[done:]])
    code = re.sub(r"#define(?:.*\\\n)*.*\n", "", re.sub(r"//.*", "", text))
    if "asm" in code:
        raise EmulatorError("hopper_ptx.cuh: PTX outside of a __device__ __forceinline__ function")
    return text


def end_of_body(text: str, begin: int) -> int:
    """Where the body that begins behind an opening brace ends: the place of its closing one. Braces
    in PTX are balanced.
    """
    depth = 1
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise EmulatorError("hopper_ptx.cuh: a function without an end")
