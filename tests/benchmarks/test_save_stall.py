"""benchmarks/save_stall.py measures a run of one process and of two."""

import json
from pathlib import Path

import pytest
from launching import free_port, start_python

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "save_stall.py"


@pytest.mark.parametrize("processes", [1, 2])
def test_measures_what_a_save_and_its_look_at_the_state_take(write_config, tmp_path, processes):
    found, port = tmp_path / "found.json", free_port()
    command = [SCRIPT, "--config", write_config(), "--every", 5, "--output", found]
    launch = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    launch |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        start_python(
            *(*command, "--commit", "abc123"),
            output=tmp_path / "printed",
            **(launch | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}),
            TORCHELASTIC_RUN_ID=f"test-{port}",
        )
        for rank in range(processes)
    ]
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0] * processes, (tmp_path / "printed").read_text()
    result = json.loads(found.read_text())
    assert result["median_step_seconds"] > 0
    assert result["first_save"] > 0 and result["saving_median"] > 0
    assert result["state_check_seconds"] > 0
