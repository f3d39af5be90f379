"""docs/promises.md names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_each_promise_names_a_test_that_exists():
    page = (TESTS.parent / "docs/promises.md").read_text()
    named = re.findall(r"`(\w+/test_\w+\.py)(?:::(\w+))?`", page)
    assert len(named) > 20
    for file, test in named:
        assert not test or f"def {test}(" in (TESTS / file).read_text(), (file, test)
        assert (TESTS / file).exists()
