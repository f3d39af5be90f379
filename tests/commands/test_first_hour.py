"""The first hour of a new user without a GPU: the commands of README and docs, as they stand there,
on a folder of text.
"""

import json
import math
import os
import re
import shlex
import subprocess
import sys
import time

from launching import run_python, start_python
from runs import ROOT, read_lines
from texts import corpus, made_texts

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PLACEHOLDERS = {r"runs/\w+/[\w-]+": "runs/mine/step-12", "FOLDER": "texts"}
SMALL = (
    *("train.steps=12", "train.eval_every=6", "train.eval_samples=16", "optim.warmup_steps=2"),
    *("checkpoint.save_every=4", "logging.log_every=1", "data.workers=1", "model.hidden_size=96"),
)
GREEDY = """
import torch
print(model.generate(torch.arange(9)[None], max_new_tokens=8, do_sample=False).tolist())
"""


def documented(pattern: str) -> str:
    """What the pattern's group finds first in README or else in docs/, for this user's run."""
    (text, *_) = (found[1] for page in PAGES if (found := re.search(pattern, page.read_text())))
    for name, own in PLACEHOLDERS.items():
        text = re.sub(name, own, text)
    return text


def command(start: str) -> list[str]:
    """The arguments of python in the documented command that starts so."""
    program, *options = shlex.split(documented(rf"(?m)^    ({start}\b.*)$"), comments=True)
    return ["-m", "mixer", *options] if program == "mixer" else options


def test_the_documented_commands_lead_from_a_folder_of_text_to_a_shared_model(tmp_path):
    output = tmp_path / "output.txt"

    def succeed(*arguments) -> str:
        output.unlink(missing_ok=True)
        return run_python(*arguments, output=output, directory=tmp_path)

    for name in ("train.py", "eval.py", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    corpus(tmp_path / "texts", made_texts(200))
    run, held_out = tmp_path / "runs/mine", tmp_path / "held-out.txt"
    held_out.write_text(made_texts(201)[-1])

    # Train, killed after the first checkpoint, and the same command again.
    train = *command("python train.py --config configs/demo.yaml name=mine"), *SMALL
    killed = start_python(*train, output=output, directory=tmp_path)
    deadline = time.monotonic() + 60
    while not (run / "step-4").exists():
        assert killed.is_alive() and time.monotonic() < deadline, output.read_text()
        time.sleep(0.01)
    killed.kill()
    killed.join()
    assert killed.exitcode == -9
    printed = succeed(*train)
    assert "resuming runs/mine/step-" in printed and "peak rate" not in printed
    assert max(map(len, printed.splitlines())) <= 100
    assert [line["step"] for line in read_lines(run) if "loss" in line] == list(range(1, 13))

    # Evaluate on a text of its own: the model has learned something of it.
    assert "| mine/step-12 |" in succeed(*command("python eval.py"), "--text", "held-out.txt")
    (report,) = run.glob("eval-step-12-held-out.txt-*/report.json")
    (result,) = json.loads(report.read_text())
    assert result["bytes"] == held_out.stat().st_size and result["loss"] < math.log(2048) - 1

    generate = command("mixer generate")
    assert generate[-1] in succeed(*generate)

    # Share: the exported folder is the same model with this package and without it.
    export = command("mixer export")
    succeed(*export[: export.index("--dtype")])
    model = export[export.index("--output") + 1]
    own = documented(r"(?s)```python\n(import mixer.*?)```").replace("runs/mine/step-12", model)
    (tmp_path / "load.py").write_text(own + GREEDY)
    (card,) = re.findall(r"(?s)```python\n(.*?)```", (tmp_path / model / "README.md").read_text())
    absent = "import sys\nsys.modules['mixer'] = None  # as if it were not installed\n"
    alone = subprocess.run(
        [sys.executable, "-c", absent + card + GREEDY],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": "", "HF_MODULES_CACHE": str(tmp_path / "modules")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert alone.returncode == 0, alone.stderr
    ids = alone.stdout.splitlines()[-1]
    assert succeed("load.py").splitlines()[-1] == ids and len(json.loads(ids)[0]) > 9
