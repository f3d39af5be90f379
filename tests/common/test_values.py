"""A value of a YAML or JSON file has the shape that it is read for, or is named."""

import pytest

from mixer.common.values import parse_yaml, shape_problem

PLAN = {
    "common": {str: object},
    "runs": {str | int: dict | None},
    "seconds": float,
    "rates": [float],
    "seeds": [int],
}
GOOD = "{common: {seed: 1}, runs: {512: null, two: {seed: 2}}, seconds: 60, rates: [1e-3]}"
WRONG = {
    "[]": "the plan = []; allowed: keys with values",
    "null": "the plan = None; allowed: keys with values",
    "{common: [1]}": "the plan.common = [1]; allowed: keys with values",
    "{common: {1: 2}}": "the plan.common has the key 1; allowed: text in quotes",
    "{runs: null}": "the plan.runs = None; allowed: keys with values",
    "{runs: {one: 3}}": "the plan.runs.one = 3; allowed: keys with values or null",
    "{seconds: x}": "the plan.seconds = 'x'; allowed: a finite number",
    "{seconds: .inf}": "the plan.seconds = inf; allowed: a finite number",
    "{rates: 1}": "the plan.rates = 1; allowed: a list",
    "{rates: [1, true]}": "the plan.rates[1] = True; allowed: a finite number",
    "{sedes: [1]}": "the plan has the key 'sedes'; allowed: common, runs, seconds, rates, seeds",
}


@pytest.mark.parametrize(("text", "problem"), [(GOOD, ""), *WRONG.items()], ids=str)
def test_the_first_value_of_another_shape_is_named(text, problem):
    assert shape_problem(parse_yaml(text), PLAN, "the plan") == problem
