# make demo: trains, evaluates and samples on the built-in corpus.
# make test: runs all tests. Both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test soak lint

# make setup TORCH=2.7.1: another torch than the tested one, which has no kernels for a V100. Later
# calls keep it. It pins a triton and CUDA wheels of its own, other ones than those of [sm70].
KEPT := $(shell cat .venv/.ready 2>/dev/null)
TORCH ?= $(KEPT)
ifneq ($(TORCH),$(KEPT))
.PHONY: .venv/.ready
endif

# Before a command that is silent for long: says every 20 s that it goes on, until this shell ends.
TICK = (n=0; while sleep 1 && kill -0 $$$$; do \
    n=$$((n + 1)); [ $$((n % 20)) -gt 0 ] || echo "... $$n s so far"; done) 2> /dev/null &

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	@echo "Setting up .venv with some 140 packages: this takes minutes, and gigabytes where there is a GPU."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@# Python's own pip may be old, and takes three times as long to find 140 packages. A failure is
	@# ignored: it works, too.
	-$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile --upgrade pip
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/; /^triton==/d)' constraints.txt > .venv/constraints.txt
	@$(TICK) $(BIN)/python -m pip install --disable-pip-version-check --no-compile \
	  -c .venv/constraints.txt -e ".[dev,eval$(if $(TORCH),,,sm70)]"
	@# Compiles to byte code on all cores (pip uses one), without the packages' own tests and the
	@# hundreds of models that transformers has. A failure is ignored: Python compiles what is
	@# missing on import.
	@echo "Compiling them to byte code."
	-@$(TICK) $(BIN)/python -m compileall -qq -j 0 \
	  -x '/(tests|testing/_internal|transformers/models/[^/]+)/' .venv/lib
	echo $(TORCH) > $@

demo: setup
	ACCELERATE_USE_CPU=true $(BIN)/python train.py --config configs/demo.yaml
	$(BIN)/python eval.py --checkpoint runs/demo/step-600
	$(BIN)/mixer curves runs/demo
	$(BIN)/mixer generate --checkpoint runs/demo/step-600 --prompt "def read(self,"

# Three workers on two cores: tests that start and kill real processes wait half of the time.
# -vv: with the -q of pyproject.toml, a line for each test.
test: setup
	$(BIN)/python -m pytest -vv -n 3 --dist loadgroup --maxfail 10

# Needs a GPU. Checks the kernels for out-of-bounds accesses, races and divergent barriers.
.PHONY: sanitize
sanitize: setup
	for tool in memcheck racecheck synccheck; do \
	  compute-sanitizer --tool $$tool --error-exitcode 1 \
	    $(BIN)/python -m pytest tests/ops/test_ops_cuda.py -k small_integers || exit 1; \
	done

# What takes too long for make test: the tests marked slow, and runs killed KILLS times at random
# moments, whose result must be that of a run that was never killed. A shorter one: make soak KILLS=5
KILLS ?= 50
soak: setup
	$(BIN)/python -m pytest -n 3 --dist loadgroup -m slow
	MIXER_SOAK_KILLS=$(KILLS) $(BIN)/python -m pytest tests/checkpoints/test_resume.py \
	  tests/data/test_preparation.py -k "killed_at_random or killed_preparation"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# Takes a minute or two. Node comes with it; without the variable it looks for a newer pyright.
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

# The kernels compiled for all GPUs, for this checkout (mixer/ops/prebuilt) and as a wheel, in
# build/wheel. Needs g++; compilers of 375 MB come from pip.
.PHONY: wheel
wheel: setup
	$(BIN)/python dev/wheel.py

# The wheel where only it and what it depends on are installed, with nvcc out of sight: what it
# brings (if that is skipped, pytest fails), then the operator.
BESIDE_WHEEL = env -u CUDA_HOME -u PYTHONPATH PATH=/usr/bin:/bin build/venv-wheel/bin
.PHONY: test-wheel
test-wheel: wheel
	$(PYTHON) -m venv --clear build/venv-wheel
	$(BESIDE_WHEEL)/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt build/wheel/*.whl pytest hypothesis
	$(BESIDE_WHEEL)/pytest tests/ops/test_wheel_kernels.py
	$(BESIDE_WHEEL)/pytest tests/ops/test_ops.py tests/ops/test_kernel_choice.py

# Tests with the oldest supported packages, in a separate environment.
.PHONY: test-min
test-min:
	$(PYTHON) -m venv build/venv-min
	build/venv-min/bin/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints-min.txt -e ".[dev]"
	build/venv-min/bin/python -m pytest tests/ops/test_ops.py tests/models/test_model.py \
	  tests/training/test_config.py tests/data tests/training/test_muon.py tests/checkpoints \
	  -k "not fsdp"

# Tests with the newest packages that pyproject.toml allows, in a separate environment: before a
# release, as users without constraints.txt get these. torch stays, whose newest wheels are for
# other GPUs, and pytest, see constraints.txt.
.PHONY: test-max
test-max:
	$(PYTHON) -m venv build/venv-max
	sed -n '/^\(torch\|triton\|pytest\)==/p' constraints.txt > build/constraints-max.txt
	build/venv-max/bin/python -m pip install --quiet --disable-pip-version-check \
	  --upgrade --upgrade-strategy eager -c build/constraints-max.txt -e ".[dev,eval]"
	build/venv-max/bin/python -m pytest -vv -n 3 --dist loadgroup

# Docker images. The image's user gets the id of whoever builds it. docker/README.md says which image
# fits which driver and GPU.
DOCKER_BUILD = docker build -f docker/Dockerfile --build-arg USER_ID=$${SUDO_UID:-$$(id -u)}

.PHONY: docker docker-v100
docker:
	$(DOCKER_BUILD) -t masked-mixer:cu130 --build-arg TORCH=2.13.0 .

docker-v100:
	$(DOCKER_BUILD) -t masked-mixer:v100 --build-arg TORCH=2.7.1 .
