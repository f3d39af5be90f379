"""Every case of `mixer::turn` against fp64. As a program it runs them in Triton's interpreter, on
the CPU, with TRITON_INTERPRET=1.
"""

import itertools

import torch

from mixer.ops import plain

APART = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # relative, of norms


def check_all(device: str, dtypes: list[torch.dtype], batch: int, tokens: int, size: int) -> None:
    torch.manual_seed(0)
    # Angles that texts share, and angles of each.
    for case in itertools.product(dtypes, [True, False], [0, 1, batch], [True, False]):
        check(*case, device, batch, tokens, size)


def check(dtype, norm, angles, has_gain, device, batch, tokens, size, heads=3) -> None:
    width, rotation, gain = heads * size, None, None
    projected = torch.randn(batch, tokens, 3 * width, device=device).to(dtype).requires_grad_()
    leaves = [projected]
    if angles:
        angle = torch.randn(angles, tokens, size // 2, device=device)
        rotation = angle.cos(), angle.sin()
    if has_gain:
        gain = torch.randn(width, device=device).requires_grad_()
        leaves.append(gain)
    dy = torch.randn(batch, tokens, width, device=device).to(dtype)

    def results(conv, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        y = conv(leaves[0][..., width : 2 * width], *leaves[1:])
        return [y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))]

    cosines = rotation or (None, None)
    exact_rotation = rotation and tuple(part.double() for part in rotation)
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    ours = results(
        lambda x, gain=None: torch.ops.mixer.turn(x, heads, norm, *cosines, gain), leaves
    )
    exact = results(
        lambda x, gain=None: plain.turn(x, heads, norm=norm, rotation=exact_rotation, gain=gain),
        exact_leaves,
    )
    for one, other in zip(ours, exact, strict=True):
        apart = (one.double() - other).norm() / other.norm()
        assert apart <= APART[dtype], f"{dtype}, {norm=}, {angles=}, {has_gain=}: {apart:.1e}"


if __name__ == "__main__":
    check_all("cpu", [torch.float32, torch.float16], batch=3, tokens=50, size=32)
    x, angle, gain = torch.randn(2, 9, 64), torch.randn(1, 9, 16), torch.randn(64)
    given = [x.requires_grad_(), 2, True, angle.cos(), angle.sin(), gain.requires_grad_()]
    torch.library.opcheck(torch.ops.mixer.turn.default, given)
