"""Where an evaluation computes."""

import pytest
import torch

from mixer.common.errors import UserError
from mixer.evaluation.scoring import choose_device


def test_a_gpu_that_is_not_there_is_refused_and_auto_does_without(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="--device cuda, but PyTorch sees no GPU: use cpu"):
        choose_device("cuda", "fp32")
    assert choose_device("auto", "fp32") == torch.device("cpu")
