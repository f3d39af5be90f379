"""The code of docs/api.md runs as it stands there, and its headings are signatures. What
a process trains depends on nothing that it trained before, nor on its thread.
"""

import inspect
import re
from concurrent.futures import ThreadPoolExecutor

import torch
from runs import ROOT, read_timeless, state_files

import mixer
from mixer.training.config import load_config
from mixer.training.loop import train

PAGE = (ROOT / "docs/api.md").read_text()
CODE = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


def test_the_page_runs_and_a_training_is_the_same_after_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    names = {}
    exec(compile(CODE, "api.md", "exec"), names)

    assert not torch.backends.cuda.matmul.allow_tf32  # of the training, for the evaluation
    assert names["model"].num_parameters() == names["trained"].num_parameters()
    assert 1 < names["result"]["loss"] < 8 and len(names["losses"]) == 2
    assert names["losses"][-1] < names["losses"][0]
    assert names["text"].startswith("def read(self")
    assert names["output"].logits.shape == (8, 128, 1000)
    assert names["y"].shape == names["x"].shape
    expected = mixer.triangular_conv(names["x"].double(), lags=torch.ones(1, 1, 128).double())
    torch.testing.assert_close(expected, names["x"].double().cumsum(1))

    again = load_config("configs/demo.yaml", ["name=again"], names["small"] | names["source"])
    with ThreadPoolExecutor(1) as other_thread:
        other_thread.submit(train, again).result()
    assert read_timeless(again.directory) == read_timeless(names["run"].directory)
    first, second = (state_files(run.directory / "best") for run in (names["run"], again))
    assert first["model.safetensors"] == second["model.safetensors"]

    signatures = dict(re.findall(r"^## `(\w+)\((.*)\)`$", PAGE, re.MULTILINE))
    assert {"load_config", "train", "evaluate_checkpoint", "keyed_conv"} < signatures.keys()
    for name, parameters in signatures.items():
        if "**" not in parameters:
            assert parameters == ", ".join(inspect.signature(names[name]).parameters), name
