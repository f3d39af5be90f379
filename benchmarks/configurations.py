"""The table of README's configurations, from results of other benchmarks.

    python benchmarks/configurations.py --output benchmarks/results/configurations_h200

Writes PATH.md. Memory is the most that tensors took at the configuration's batch size.
"""

from pathlib import Path

from saving import file_of, markdown, parser_of

from mixer.common.errors import run_command
from mixer.common.files import read_json, write_text

RESULTS = Path(__file__).parent / "results"
# The file of results and the run of each configuration.
RUNS = {
    "attention": ("minute_512_h200", "attention in 3 of 8 blocks, mixing in the MLP"),
    "keyed": ("today_512_h200", "keyed in some blocks, shifted keys 512, 300 s, lr 0.002"),
    "recipe": ("recipe_512_h200", "recipe, 480 steps"),
    "h200, the paper's": ("recipe_512_h200", "paper"),
}
HEAD = ["configuration", "parameters, M", "memory, GB"]


def main() -> None:
    options = parser_of(__doc__).parse_args()
    rows = []
    for configuration, (file, name) in RUNS.items():
        run = read_json(RESULTS / f"{file}.json", "keep the results")["runs"][name]
        cells = [
            configuration,
            f"{run['parameters'] / 1e6:.1f}",
            f"{run['peak_memory_gb']:.1f}",
        ]
        rows.append(cells)
    files = dict.fromkeys(file for file, _ in RUNS.values())
    sources = ", ".join(f"[{file}.json]({file}.json)" for file in files)
    source = f"From {sources}, which have hardware and commits."
    text = "\n\n".join(["# Configurations", markdown(HEAD, rows), source]) + "\n"
    write_text(file_of(options.output, ".md"), text)
    print(text)


if __name__ == "__main__":
    run_command(main)
