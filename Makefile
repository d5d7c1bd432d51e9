# make help shows the targets.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV := $(VENV)/.dev
REHEARSAL := .venv-rehearsal
DOCS := .venv-docs
NEWEST := .venv-newest

.DEFAULT_GOAL := help
.PHONY: help install dev lock train unit test thorough newest lint format parity bench rehearsal rehearse first-gpu docs reference pictures clean

help:  ## show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

install: $(READY)  ## make the virtual environment and install what training needs
dev: $(DEV)  ## install the rest too: all extras, tests and linters

# TORCH is the build of PyTorch; set it where pip's default is not the one for the machine, e.g.
# make install TORCH=torch==2.15.0. All other packages have the versions and hashes of the two locks.
TORCH ?= torch==2.13.0
LOCKED := install --quiet --no-deps --require-hashes
$(READY): pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip $(LOCKED) -r requirements.lock
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	$(BIN)/python -m pip check
	@touch $@

# What the tests and the reference need of experiments/extensions.
PACKAGES := -e experiments/extensions/flux
$(DEV): $(READY) requirements-dev.lock experiments/extensions/flux/pyproject.toml
	$(BIN)/python -m pip $(LOCKED) -r requirements-dev.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation $(PACKAGES)
	$(BIN)/python -m pip check
	@touch $@

lock: $(DEV)  ## write the locks anew: the versions of the environment, with their hashes
	.ci/lock $(BIN)/python

train: $(READY)  ## train a small Llama on the Python standard library's sources, on this machine
	$(BIN)/python -m harness.train experiment=quickstart

# tests/uses.py says what the marks mean.
unit: $(DEV)  ## run the tests that start no processes
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not pool and not process and not slurm and not rehearsal"

# Three processes on two cores: one group of tests waits for SLURM most of its time, one keeps eight ranks busy.
# tests/conftest.py says what a group is, and which begins first.
TEST_PROCESSES ?= 3
test: lint  ## lint, then run the tests
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadgroup --no-loadscope-reorder --durations=40

thorough: export THOROUGH = 1
thorough: test  ## the same with all rows of all tables

# What meets most of torch: its private names, layouts against one process, resume, pipelines, compiled blocks.
TORCH_NEWEST ?= torch==2.15.0
CORE := $(addprefix tests/,test_imports.py tools/parity/test_parity.py checkpoint/test_resume.py \
	parallelism/test_split_backward.py parallelism/test_compile.py)
newest:  ## run a core of the tests with the newest torch, in an environment of its own (6 GB)
	$(MAKE) dev VENV=$(NEWEST) TORCH=$(TORCH_NEWEST)
	$(NEWEST)/bin/python -m pytest -n 2 --dist loadgroup $(CORE)

lint: $(DEV)  ## check style, words, the floor plan and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/check_words.py
	$(BIN)/python .ci/check_house.py
	$(BIN)/mypy

format: $(DEV)  ## bring the code into the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

parity: $(READY)  ## prove that every layout computes what one process computes
	$(BIN)/harness parity

bench: $(READY)  ## measure training speed on this CPU (experiments/README.md says how to add torchtitan)
	$(BIN)/python experiments/cpu_baseline/compare.py

# Builds of torch for CUDA and for a CPU do not share an environment. === takes the one that is called so, which
# is the one for CUDA; a build for a CPU has a name behind its version. CUDA's headers have to be of its version.
TORCH_CUDA ?= torch===2.13.0
$(REHEARSAL)/.ready: pyproject.toml requirements.lock requirements-dev.lock
	$(PYTHON) -m venv $(REHEARSAL)
	$(REHEARSAL)/bin/python -m pip $(LOCKED) -r requirements.lock -r requirements-dev.lock
	$(REHEARSAL)/bin/python -m pip install --quiet --only-binary :all: $(TORCH_CUDA)
	$(REHEARSAL)/bin/python -m pip install --quiet --no-deps --no-build-isolation -e . $(PACKAGES)
	cuda=$$($(REHEARSAL)/bin/python -c 'from harness.tools.rehearse.build import cuda_version; print(cuda_version())') && \
	$(REHEARSAL)/bin/python -m pip install --quiet "nvidia-cuda-crt==$$cuda.*"
	$(REHEARSAL)/bin/python -m pip check
	@touch $@

rehearsal: $(REHEARSAL)/.ready  ## make an environment for rehearsals on virtual GPUs (6 GB; needs g++)

rehearse: $(REHEARSAL)/.ready  ## run the tests that rehearse: every layout, format and way to run a step
	$(REHEARSAL)/bin/python -m pytest -m rehearsal tests/tools/rehearse

# FIRST_GPU_PYTHON is the version of Python on the machine with the GPU.
FIRST_GPU_PYTHON ?= 3.12
first-gpu: $(READY)  ## build build/first_gpu: a first measurement on a GPU, for a machine without a network
	$(BIN)/python experiments/first_gpu/pack.py build/first_gpu --python $(FIRST_GPU_PYTHON)

# MkDocs has an environment of its own, so that its packages and the harness's need not agree.
$(DOCS)/.ready: docs/requirements.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip $(LOCKED) -r docs/requirements.txt
	$(DOCS)/bin/python -m pip check
	@touch $@

docs: $(DOCS)/.ready  ## build the documentation into site/; warnings are errors (needs no torch)
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build
	@echo "site/index.html can be read from the disk; to search, too: python -m http.server -d site"

reference: $(DEV)  ## write docs/reference from the code
	$(BIN)/python docs/reference.py

pictures: $(DEV)  ## draw docs/pictures
	$(BIN)/python docs/pictures.py

clean:  ## remove the environment and caches, keep runs
	rm -rf $(VENV) $(REHEARSAL) $(DOCS) $(NEWEST) site build *.egg-info .pytest_cache .mypy_cache .ruff_cache
