"""What a checkpoint holds: the state of its step, whatever it is and however late it is written."""

import shutil
import time

from runs import FSDP, assert_same
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mixer.checkpoints.writer import CheckpointWriter


def test_a_checkpoint_loads_alone_in_fp32_and_is_readable_as_the_umask_says(finished, tmp_path):
    moved = shutil.copytree(finished / "step-12", tmp_path / "moved")
    shutil.rmtree(moved / "trainer_state")  # what from_pretrained needs is outside of it
    model = AutoModelForCausalLM.from_pretrained(moved)
    tokenizer = AutoTokenizer.from_pretrained(moved)
    weights = load_file(moved / "model.safetensors")
    assert {str(weight.dtype) for weight in weights.values()} == {"torch.float32"}
    prompt = tokenizer("def ", return_tensors="pt").input_ids
    assert tokenizer.decode(model.generate(prompt, max_new_tokens=5)[0]).startswith("def ")
    mode = (finished / "metrics.jsonl").stat().st_mode
    assert (finished / "step-12/model.safetensors").stat().st_mode == mode


def test_nothing_is_unpickled_from_a_checkpoint(finished):
    kinds = {file.suffix for file in finished.rglob("step-*/**/*") if file.is_file()}
    # the model's own code, for those who have not installed this package
    assert kinds <= {".json", ".safetensors", ".py"}


def written_late() -> None:
    """Checkpoints that are written when training has gone on."""
    real = CheckpointWriter._write

    def write(*arguments):
        time.sleep(0.3)
        real(*arguments)

    CheckpointWriter._write = write


def test_a_checkpoint_holds_the_state_of_its_step_however_late_it_is_written(
    write_config, launch, tmp_path
):
    options = {"processes": 2, "environment": FSDP}
    launch("--config", write_config(), "name=plain", **options).succeed()
    late = {"before": written_late} | options
    launch("--config", write_config(), "name=late", **late).succeed()
    for step in (8, 12):
        assert_same(tmp_path / "runs/late", tmp_path / "runs/plain", step)
