# make demo: train, evaluate and sample on the built-in corpus.  make test: all tests.  Both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test soak lint

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: setup
	$(BIN)/accelerate launch --cpu --num_processes 1 train.py --config configs/demo.yaml
	$(BIN)/python eval.py --checkpoint runs/demo/step-600
	$(BIN)/python -m mixer.report runs/demo
	$(BIN)/python -m mixer.sample --checkpoint runs/demo/step-600 --prompt "def read(self, "

test: setup
	$(BIN)/python -m pytest

soak: setup
	MIXER_SOAK_KILLS=20 $(BIN)/python -m pytest tests/test_resume.py -k killed

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
