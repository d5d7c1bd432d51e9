# make help shows the targets.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help install train test thorough lint format parity bench soak clean

help:  ## show this help
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

install: $(READY)  ## make the virtual environment and install everything

# TORCH is the build of PyTorch to install first; set it where pip's default is not the one for the machine,
# e.g. make install TORCH='torch==2.12.0'.
TORCH ?= torch==2.13.0
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $@

train: $(READY)  ## train a small Llama on the Python standard library's sources, on this machine
	$(BIN)/python -m harness.train experiment=quickstart

# In two parts side by side, because schedulers and launchers wait most of their time; what they print comes last.
# Only the other part has tests of eight ranks, of which two at once would starve each other.
BESIDE := tests/slurm tests/cluster tests/sweep tests/model tests/data tests/parallelism/test_all_sizes.py \
	tests/optimizer tests/plan tests/report tests/test_adding_a_model.py tests/test_bench.py tests/test_conf_files.py \
	tests/test_convert.py tests/test_convert_families.py tests/test_experiments.py tests/test_notebooks.py \
	tests/test_readme.py tests/test_user_errors.py
test: lint  ## lint, then run the tests
	@log=$$(mktemp); \
	$(BIN)/python -m pytest --durations=25 $(BESIDE) > $$log 2>&1 & beside=$$!; \
	$(BIN)/python -m pytest --durations=60 $(BESIDE:%=--ignore=%); code=$$?; \
	wait $$beside || code=1; cat $$log; rm -f $$log; exit $$code

thorough: export THOROUGH = 1
thorough: test  ## the same with all rows of all tables

lint: $(READY)  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)  ## bring the code into the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

parity: $(READY)  ## prove that every layout computes what one process computes
	$(BIN)/python -m harness.parity

bench: $(READY)  ## measure training speed on this CPU (experiments/README.md says how to add torchtitan)
	$(BIN)/python experiments/cpu_baseline/compare.py

soak: $(READY)  ## kill training runs at random moments and inject faults into checkpoints; writes the tables
	$(BIN)/python experiments/checkpoint/soak.py
	$(BIN)/python experiments/checkpoint/faults.py

clean:  ## remove the environment and caches, keep runs
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
