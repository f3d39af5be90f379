"""Can the tests fail? Breaks random lines of mixer/, one at a time, and runs tests that see them.

    python dev/mutate.py                             # 100 lines; again: goes on where it was
    python dev/mutate.py --exclude '*/cuda.py'       # leaves out what needs a GPU
    python dev/mutate.py --tests 40 --seconds 300    # survivors again, by more of their tests

First all tests run once, traced: which test runs which lines, in how long. A line that runs on
import is seen by all tests that run anything of its file. Of the tests that see a line, those run
whose lines are most in its file, the fastest first. All this happens in a clone of a commit: what
is not committed is not seen. --out gets lines.json (remove it to trace again), results.jsonl,
written as it goes on, and report.txt. Needs Linux, git, pytest and pytest-xdist.
"""

import argparse
import ast
import difflib
import fnmatch
import json
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

from mutate_edits import Edit, edits
from mutate_tests import run_tests, trace


def draw(copy: Path, options: argparse.Namespace) -> list[tuple[str, str, Edit, bytes]]:
    """A change on each of so many lines: file, description, change, new text; more begin alike."""
    lines, drawn = defaultdict(list), []
    for path in copy.glob("mixer/**/*.py"):
        file, source = path.relative_to(copy).as_posix(), path.read_bytes()
        if not any(fnmatch.fnmatch(file, pattern) for pattern in options.exclude):
            for edit in edits(source):
                lines[file, source.count(b"\n", 0, edit.begin) + 1].append(edit)
    places = sorted(lines)
    random.Random(options.seed).shuffle(places)
    for file, line in places:
        edit = random.Random(f"{options.seed} {file} {line}").choice(lines[file, line])
        source = (copy / file).read_bytes()
        new = source[: edit.begin] + edit.new.encode() + source[edit.end :]
        try:
            same = ast.dump(ast.parse(new)) == ast.dump(ast.parse(source))
        except SyntaxError:
            continue
        if len(drawn) == options.count:
            break
        if not same:
            texts = (text.decode().splitlines() for text in (source, new))
            diff = [*difflib.unified_diff(*texts, n=0, lineterm="")][3:]
            drawn.append((file, "\n".join([f"{file}:{line}: {edit.kind}", *diff]), edit, new))
    return drawn


def see(file: str, edit: Edit, traced: dict) -> list[str]:
    """The tests that see a change, those first whose lines are most in its file."""
    ran = {test: each["lines"].get(file, []) for test, each in traced["tests"].items()}
    lines = range(edit.first, edit.last + 1)
    found = [test for test in ran if any(line in lines for line in ran[test])]
    if not found and any(line in lines for line in traced["imported"].get(file, [])):
        found = [test for test in ran if ran[test]] or [*ran]
    total = {test: sum(map(len, traced["tests"][test]["lines"].values())) for test in found}
    return sorted(found, key=lambda test: -len(ran[test]) / (1 + total[test]))


def choose(found: list[str], tests: dict, options: argparse.Namespace) -> list[str]:
    """As many of them as the options allow, the fastest first."""
    chosen, left = [], options.seconds
    for test in found:
        if len(chosen) < options.tests and (tests[test]["seconds"] <= left or not chosen):
            chosen.append(test)
            left -= tests[test]["seconds"]
    return sorted(chosen, key=lambda test: tests[test]["seconds"])


def try_tests(copy: Path, file: str, new: bytes, only: list[str], seconds: float) -> dict:
    """What tests say of a file's new text."""
    old = (copy / file).read_bytes()
    (copy / file).write_bytes(new)
    try:
        status, reports, run = run_tests(copy, "-x", only=only, limit=120 + 3 * seconds)
    finally:
        (copy / file).write_bytes(old)
    outcome = {None: "timed out", 0: "survived", 5: "survived"}.get(status, "killed")  # 5: no test
    said = (run / "output").read_text().strip().splitlines()[-1:]
    by = {"by": None, "said": "".join(said), "outcome": outcome}
    failed = [report for report in reports if report["outcome"] == "failed"]
    return by | ({"by": failed[0]["id"], "said": failed[0]["said"]} if failed else {})


def report(records: list[dict], traced: dict) -> str:
    """What all of it comes to, and each change that no test noticed."""
    survived = [record for record in records if record["outcome"] == "survived"]
    unseen = sum(not record["seen"] for record in survived)
    count = Counter(record["outcome"] for record in records)
    rates = len(survived) / len(records), (len(survived) - unseen) / max(len(records) - unseen, 1)
    lines = [
        f"commit {traced['commit']}: {len(traced['tests'])} tests, {len(records)} lines changed",
        f"killed {count['killed']}, timed out {count['timed out']}, survived {len(survived)}",
        f"{unseen} of the survivors are run by no test",
        f"survival rate {rates[0]:.1%}; of lines that a test runs {rates[1]:.1%}",
        f"left out, failing on unchanged code: {', '.join(traced['failed']) or 'no test'}",
    ]
    for each in survived:
        lines += ["", f"{each['mutant']}\n(ran {len(each['tests'])} of {each['seen']} tests)"]
    return "\n".join(lines) + "\n"


def main() -> None:
    how = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    parser.add_argument("--count", type=int, default=100, help="lines to change")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exclude", nargs="*", default=[], metavar="PATTERN", help="no such files")
    parser.add_argument("--tests", type=int, default=12, help="at most so many for a change")
    parser.add_argument("--seconds", type=float, default=90, help="and of so long in total")
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--workers", type=int, default=2, help="of the traced run")
    parser.add_argument("--part", default="0/1", help="0/2 and 1/2, at once: half of them each")
    parser.add_argument("--out", type=Path, default=Path("build/mutation"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        root = Path(__file__).resolve().parents[1]
        subprocess.run(["git", "clone", "--quiet", root, copy], check=True)
        subprocess.run(["git", "checkout", "--quiet", options.commit], cwd=copy, check=True)
        measure(copy, options)


def measure(copy: Path, options: argparse.Namespace) -> None:
    lines, results = options.out / "lines.json", options.out / "results.jsonl"
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=copy, text=True).strip()
    if not lines.exists():
        traced = {"commit": commit, "sound": []} | trace(copy, options.workers)
        lines.write_text(json.dumps(traced))
    traced = json.loads(lines.read_text())
    if traced["commit"] != commit:
        sys.exit(f"{lines} is of commit {traced['commit']}: give another --out")
    drawn = draw(copy, options)
    part, parts = map(int, options.part.split("/"))
    try_all(copy, options, drawn[part::parts], traced)
    while len(read(results).keys() & {mutant for _, mutant, _, _ in drawn}) == len(drawn):
        records = [read(results)[mutant] for _, mutant, _, _ in drawn]
        killers = {record["by"] for record in records if record.get("by")} - {*traced["sound"]}
        if not killers:
            (options.out / "report.txt").write_text(report(records, traced))
            return print(report(records, traced), end="")
        # In another order than their own, even tests that passed may fail on unchanged code.
        _, reports, _ = run_tests(copy, only=sorted(killers))
        failed = {each["id"] for each in reports if each["outcome"] == "failed"}
        traced["failed"] += sorted(failed)
        traced["sound"] += sorted(killers - failed)
        traced["tests"] = {test: traced["tests"][test] for test in traced["tests"].keys() - failed}
        lines.write_text(json.dumps(traced))
        try_all(copy, options, drawn, traced)


def try_all(copy: Path, options: argparse.Namespace, drawn: list[tuple], traced: dict) -> None:
    """Tries what has not been tried, or not with so many tests, or was killed by an unsound one."""
    for file, mutant, edit, new in drawn:
        found = see(file, edit, traced)
        record = read(options.out / "results.jsonl").get(mutant, {"by": None})
        if "outcome" not in record or record["by"] in traced["failed"]:
            record = {"mutant": mutant, "outcome": "survived", "by": None, "tests": [], "seen": -1}
        chosen = choose(found, traced["tests"], options)
        only = [test for test in chosen if test not in record["tests"]]
        if record["outcome"] == "survived" and (only or record["seen"] < 0):
            record |= {"seen": len(found), "tests": record["tests"] + only}
            if only:
                seconds = sum(traced["tests"][test]["seconds"] for test in only)
                record |= try_tests(copy, file, new, only, seconds)
            with (options.out / "results.jsonl").open("a") as output:
                output.write(json.dumps(record) + "\n")
            print(record["outcome"], mutant, flush=True)


def read(results: Path) -> dict[str, dict]:
    """The last record of each change."""
    text = results.read_text() if results.exists() else ""
    return {record["mutant"]: record for record in map(json.loads, text.splitlines())}


if __name__ == "__main__":
    main()
