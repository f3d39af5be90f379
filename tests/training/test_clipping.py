"""Clipping is torch's, although no pass over the gradients is made for it."""

import pytest
import torch
from models import small_model, tokens

from mixer.training.optim import OptimConfig, build_optimizer, clip, gradient_norm


def recipe(model):
    return build_optimizer(model, OptimConfig(name="muon", lr=0.01))


@pytest.mark.parametrize("limit", (1e-3, 1e3, 0.0))
def test_a_clipped_step_is_that_of_gradients_that_torch_clips(limit):
    """Two steps, as Muon and AdamW forget the size of the first gradient."""
    models = [small_model() for _ in range(2)]
    optimizers = [recipe(model) for model in models]
    for step in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            (model(tokens()).logits - step).square().mean().backward()
        theirs = torch.nn.utils.clip_grad_norm_(models[1].parameters(), limit or torch.inf)
        norm = gradient_norm(optimizers[0])
        clip(optimizers[0], norm, limit)
        torch.testing.assert_close(norm, theirs)
        assert 1e-3 < norm < 1e3
        for optimizer in optimizers:
            optimizer.step()
    for one, two in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def test_fp16s_loss_scale_leaves_the_clipping_as_it_is():
    """GradScaler sets `grad_scale` too, which must not take the place of clipping's."""
    models = [small_model() for _ in range(2)]
    optimizers = [recipe(model) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = (model(tokens()).logits - step).square().mean()
            (scaler.scale(loss) if model is models[0] else loss).backward()
        scaler.unscale_(optimizers[0])
        clip(optimizers[0], gradient_norm(optimizers[0]), 1e-3)
        scaler.step(optimizers[0])
        scaler.update()
        clip(optimizers[1], gradient_norm(optimizers[1]), 1e-3)
        optimizers[1].step()
    for one, two in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
