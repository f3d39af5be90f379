"""Runs the tests of a copy of the repository for mutate.py, and traces which lines each one runs.

Their processes import this file, too: as a plugin of pytest and, to be traced, in sitecustomize. A
line is written down as it runs, since many a test kills what it has started.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path


def run_tests(copy: Path, *arguments: str, only=None, limit=None, watch=False):
    """pytest's status (None after the limit in seconds), what it reports, and the run's folder.

    `only` are the tests to run, in this order. No process is left, whatever the tests have started.
    """
    run = Path(tempfile.mkdtemp(dir=copy.parent))
    shutil.copy(__file__, run)
    environment = os.environ | {"MUTATE_RUN": str(run), "PYTEST_PLUGINS": "mutate_tests"}
    environment |= {"PYTHONPATH": f"{run}:{copy}", "PYTHONDONTWRITEBYTECODE": "1"}
    if watch:
        start = f"import mutate_tests\nmutate_tests.trace_lines({str(copy)!r})\n"
        (run / "sitecustomize.py").write_text(start)
    command = [sys.executable, "-m", "pytest", f"--basetemp={run}/tmp", "-pno:cacheprovider"]
    if only is not None:
        (run / "only").write_text(json.dumps(only))
        command += dict.fromkeys(test.partition("::")[0] for test in only)
    with open(run / "output", "w") as output:
        how = {"cwd": copy, "env": environment, "stdout": output, "stderr": output}
        process = subprocess.Popen([*command, *arguments], start_new_session=True, **how)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            kill_all(f"MUTATE_RUN={run}")
            process.wait()
            shutil.rmtree(run / "tmp", ignore_errors=True)
    text = (run / "reports").read_text() if (run / "reports").exists() else ""
    return status, [json.loads(line) for line in text.splitlines()], run


def kill_all(setting: str) -> None:
    """Kills the processes that began with this setting in their environment."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if setting.encode() in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)
        except OSError:
            pass  # it has ended, or is another's


def trace(copy: Path, workers: int) -> dict:
    """The tests that pass, with seconds and the lines they run, and which lines run on import."""
    _, reports, run = run_tests(copy, f"-n{workers}", "--dist=loadgroup", watch=True)
    lines = defaultdict(lambda: defaultdict(set))
    fixtures, imported = {}, defaultdict(set)
    for path in run.glob("lines-*"):
        context = None
        for kind, _, text in (line.partition(" ") for line in path.read_text().splitlines()):
            if kind == "context":
                context = text
            elif kind == "fixtures":
                fixtures[context] = json.loads(text)
            else:
                file, _, number = text.rpartition(":")
                places = lines[context] if context and kind == "line" else imported
                places[file].add(int(number))
    # A worker's report comes twice, from itself and from who started it.
    parts = defaultdict(dict)
    for report in reports:
        parts[report["id"]][report["when"]] = report
    failed = [test for test, each in parts.items() if "failed" in outcomes(each)]
    if failed:  # perhaps by the trace
        _, again, _ = run_tests(copy, only=[name(test) for test in failed])
        failed = [report["id"] for report in again if report["outcome"] == "failed"]
    tests = {}
    for test, each in parts.items():
        if name(test) not in failed and "skipped" not in outcomes(each):
            for fixture in fixtures.get(test, []):
                for file, numbers in lines[f"fixture {fixture}"].items():
                    lines[test][file] |= numbers
            tests[name(test)] = {
                "seconds": round(sum(part["seconds"] for part in each.values()), 2),
                "lines": {file: sorted(numbers) for file, numbers in lines[test].items()},
            }
    imported = {file: sorted(numbers) for file, numbers in imported.items()}
    return {"tests": tests, "imported": imported, "failed": sorted({*failed})}


def outcomes(reports: dict[str, dict]) -> list[str]:
    return [report["outcome"] for report in reports.values()]


def name(test: str) -> str:
    """A test's name without the group that --dist=loadgroup adds."""
    return re.sub(r"@\w+$", "", test)


# What follows runs in the processes of the tests.

RUN = Path(os.environ.get("MUTATE_RUN", "."))
seen, log = set(), None


def trace_lines(copy: str) -> None:
    """Writes each line of mixer/ that this process, or a fork of it, runs; for each test once."""
    prefix = os.path.join(copy, "mixer", "")

    def on_line(frame, event, _):
        code = frame.f_code
        place = (code.co_filename, frame.f_lineno)
        if event == "line" and place not in seen:
            seen.add(place)
            kind = "line" if code.co_flags & 1 else "import"  # 1, CO_OPTIMIZED: a function's code
            write(kind, f"{os.path.relpath(place[0], copy)}:{place[1]}")
        return on_line

    def on_call(frame, event, _):
        return on_line if frame.f_code.co_filename.startswith(prefix) else None

    def begin():
        global log
        log = os.open(RUN / f"lines-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        if current := os.environ.get("MUTATE_CURRENT"):
            enter(Path(current).read_text())

    begin()
    os.register_at_fork(after_in_child=begin)
    threading.settrace(on_call)
    sys.settrace(on_call)


def write(kind: str, text: str) -> None:
    os.write(log, f"{kind} {text}\n".encode())


def enter(context: str) -> None:
    """The lines from here on are this test's, or this fixture's."""
    seen.clear()
    write("context", context)


def enter_here(context: str) -> None:
    """And so are those of processes that begin from here on."""
    if log is not None:
        current = RUN / f"current-{os.getpid()}"
        current.write_text(context)
        os.environ["MUTATE_CURRENT"] = str(current)
        enter(context)


def pytest_collection_finish(session):
    if (RUN / "only").exists():
        only = json.loads((RUN / "only").read_text())
        items = [item for item in session.items if item.nodeid in only]
        session.items[:] = sorted(items, key=lambda item: only.index(item.nodeid))


def pytest_runtest_setup(item):
    enter_here(item.nodeid)
    if log is not None:
        write("fixtures", json.dumps(item.fixturenames))


def pytest_fixture_setup(fixturedef, request):
    """What a fixture of many tests does for the first of them, it does for all of them."""
    own = fixturedef.scope == "function"
    enter_here(request.node.nodeid if own else f"fixture {fixturedef.argname}")


def pytest_runtest_call(item):
    enter_here(item.nodeid)


def pytest_runtest_logreport(report):
    said = str(report.longrepr).splitlines() if report.failed else []
    line = {"id": report.nodeid, "when": report.when, "outcome": report.outcome}
    line |= {"seconds": report.duration, "said": next((s for s in said if s.startswith("E ")), "")}
    with open(RUN / "reports", "a") as file:
        file.write(json.dumps(line) + "\n")
