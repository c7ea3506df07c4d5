# `make demo` and `make test` do all their own set-up: they need only make and python3 (3.10 or newer).

PYTHON ?= python3
# More workers than cores, because tests wait for processes and deadlines about half of the time.
WORKERS ?= 4
ROUNDS ?= 500
RUNS ?= 150
# Empty: 30 for paper, 20 for beyond, 10 for servers.
TRIALS ?=
DATA ?= ../shared/data
SEED ?= 0
MINUTES ?= 30
QUICK ?= $(addprefix tests/,config formats ops policy recovery state store theory util)
PYTHONS ?= 3.10 3.11 3.12 3.13 3.14
ATTACKS ?= model memory_model terms_model episodes same_step hosts removed kills crash power races creations clocks faults corruption fuzz hostile claims secrets

VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
OPTIMIZERS := .venv-optimizers
TORCHREC := .venv-torchrec
DEEPSPEED := .venv-deepspeed
JAX := .venv-jax
TORCHTITAN := .venv-torchtitan
RAY := .venv-ray
DOCS := .venv-docs
PYTHON_OF := .venv-python
# The files that are programs, without those that run for long and the one that they kill.
BENCHMARKS = $(filter-out $(addprefix benchmarks/,soak.py kills.py killed.py ettr.py),$(shell grep -l __main__ benchmarks/*.py))
SETUP := pyproject.toml constraints.txt
# Python compiles what is imported; to compile all of torch here would take a minute or two.
INSTALL := $(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt -e
# So that what was imported once is compiled, whatever the environment says: hundreds of processes import the same.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo demo-ranks demo-rows paper paper-quick beyond beyond-quick servers servers-quick man pictures quick test lint types layers unit long oldest pythons optimizers frameworks gpu docs package format bench kills ettr ettr-quick torture soak attack ceph clean

help:
	@echo "make demo     a host is lost with its memory, the store is slow: the cost with scarctl and with full checkpoints: under a minute"
	@echo "make demo-ranks  four ranks train, one is killed, all go on: FSDP2, and a mixture of experts"
	@echo "make demo-rows   half of the rows of an embedding model are lost: what each way of saving them has cost: some minutes"
	@echo "make paper    the paper's figures, into docs: long, goes on where it was stopped: DATA=$(DATA) TRIALS=30"
	@echo "make paper-quick  the same with a few iterations, into build: shows that it runs"
	@echo "make beyond   models that the paper does not have, into docs: half an hour, goes on where it was stopped: TRIALS=20"
	@echo "make beyond-quick  the same with a few iterations, into build"
	@echo "make servers  parameter servers that are killed, in six ways, into docs/servers: long, goes on where it was stopped: TRIALS=10"
	@echo "make servers-quick  the same with a few iterations, into build"
	@echo "make quick    tests of everything that needs neither torch nor another process: under a minute"
	@echo "make test     lint, types, layers and unit, in this order"
	@echo "make long     tests that unit leaves out: half an hour"
	@echo "make oldest   the adapters' tests with the oldest versions of their frameworks, in $(OLDEST): some minutes, most of it set-up"
	@echo "make pythons  the quick tests, and some with torch, under every Python that is found: minutes each, in $(PYTHON_OF)-*: PYTHONS=\"$(PYTHONS)\""
	@echo "make optimizers  train with every optimizer of other packages, stop, resume: some minutes, in $(OPTIMIZERS)"
	@echo "make frameworks  tests with frameworks that have an environment of their own: $(TORCHREC), $(DEEPSPEED), $(TORCHTITAN), $(RAY), $(JAX): some minutes"
	@echo "make gpu      tests that need a GPU, with the scarctl and the torch of another Python: PYTHON=$(PYTHON)"
	@echo "make man      the manual page, docs/scarctl.1, from what the commands say of their options"
	@echo "make pictures  the pictures of report, status and live view, from a real run: a minute, needs Chromium"
	@echo "make docs     the site, into build/site: broken links fail; in $(DOCS)"
	@echo "make package  sdist and wheel, into dist, checked as the package index does; in $(DOCS)"
	@echo "make format   rewrite the sources the way that lint wants them"
	@echo "make bench    every benchmark, one after the other"
	@echo "make kills    kill README's loop, and count the iterations that are trained again: an hour, goes on where it was stopped"
	@echo "make ettr     effective training time under random kills, in four ways of saving: two hours, goes on where it was stopped"
	@echo "make ettr-quick  the same with one process and one kill: a minute or two"
	@echo "make torture  kill, stop and end training and daemon at random moments: ROUNDS=$(ROUNDS) SEED=$(SEED)"
	@echo "make soak     train for long, watch memory and descriptors: MINUTES=$(MINUTES)"
	@echo "make attack   crashes, power losses, races, faults, damage, fuzzing: the long forms, hours; one of them: ATTACKS=power"
	@echo "make ceph     the conformance suite on Ceph's object gateway, if radosgw, ceph-mon and ceph-osd are installed"
	@echo "make clean    remove $(VENV), caches and build results"

demo: $(VENV)/.examples
	$(BIN)/python examples/quickstart/demo.py --data $(DATA)

demo-ranks: $(VENV)/.examples
	$(BIN)/python examples/lost_rank.py fsdp_transformer --kill
	$(BIN)/python examples/lost_rank.py moe --kill

demo-rows: $(VENV)/.examples
	$(BIN)/python -m examples.embedding.compare

# One thread, because sums in one order are the same on every machine.
paper paper-quick beyond beyond-quick: export OMP_NUM_THREADS = 1
paper paper-quick beyond beyond-quick: export OPENBLAS_NUM_THREADS = 1
paper paper-quick beyond beyond-quick: export MKL_NUM_THREADS = 1

paper: $(VENV)/.paper
	$(BIN)/python -m examples.paper.paper --data $(DATA) $(TRIALS:%=--trials %)

paper-quick: $(VENV)/.paper
	$(BIN)/python -m examples.paper.paper --data $(DATA) --quick --out build/paper-quick

beyond: $(VENV)/.examples
	$(BIN)/python -m examples.beyond.beyond $(TRIALS:%=--trials %)

beyond-quick: $(VENV)/.examples
	$(BIN)/python -m examples.beyond.beyond --quick --out build/beyond-quick

servers: $(VENV)/.examples
	$(BIN)/python -m examples.parameter_server.experiment --data $(DATA) $(TRIALS:%=--seeds %)
	$(BIN)/python -m tests.examples.chaos --runs $(RUNS)

servers-quick: $(VENV)/.examples
	$(BIN)/python -m examples.parameter_server.experiment --data $(DATA) --quick

# Lint, types and layers use one core. Meanwhile what the workers of `unit` import is compiled.
test: $(VENV)/.dev
	@$(MAKE) --no-print-directory $(VENV)/.compiled & \
	    $(MAKE) --no-print-directory lint types layers; code=$$?; wait; exit $$code
	@$(MAKE) --no-print-directory unit

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.documents

types: $(VENV)/.dev
	@# It once died of an internal error (2) without any output; findings exit with 1.
	$(BIN)/mypy || { test $$? -eq 2 && $(BIN)/mypy --show-traceback; }

layers: $(VENV)/.dev
	$(BIN)/lint-imports

# A worker runs thousands of tests with threads. glibc would give most threads 64 MB, which each fork copies.
quick unit long oldest pythons optimizers frameworks: export MALLOC_ARENA_MAX = 2

quick: $(VENV)/.dev
	$(BIN)/python -m pytest -p tests.support.quick -m "not slow and not long" -r fE $(QUICK)

# What took how long is written into build/durations.txt.
unit: $(VENV)/.compiled
	$(BIN)/python -m pytest -p tests.support.durations -n $(WORKERS) --dist worksteal -m "not long"

long: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m long
	@# Properties again, with more examples.
	$(BIN)/python -m pytest -n $(WORKERS) --hypothesis-profile long -m "not long and not slow" $(QUICK)
	$(MAKE) optimizers

oldest: $(OLDEST)/.oldest
	@# setuptools warns whenever this Lightning is imported.
	$(OLDEST)/bin/python -m pytest -n $(WORKERS) -W "ignore:pkg_resources is deprecated" -W "ignore:Deprecated call to" \
	    --ignore tests/adapters/jax tests/adapters
	@# In processes of their own: once JAX has run, it warns of every fork, and other tests fork.
	$(OLDEST)/bin/python -m pytest -n $(WORKERS) tests/adapters/jax

# pyenv's commands for versions that are not chosen exist, and fail.
pythons:
	@failed=; for version in $(PYTHONS); do \
	    python=; for one in python$$version "$$HOME"/.pyenv/versions/$$version.*/bin/python; do \
	        if "$$one" -c "" 2>/dev/null; then python=$$one; break; fi; done; \
	    test -n "$$python" || { echo "== Python $$version: not found"; continue; }; \
	    echo "== Python $$version: $$python"; own=$(PYTHON_OF)-$$version; \
	    { test -x $$own/bin/python || "$$python" -m venv $$own; } \
	    && $$own/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . hypothesis pytest pytest-timeout \
	    && $$own/bin/python -m pytest -p tests.support.quick -m "not slow and not long" $(filter-out %.py,$(QUICK)) \
	    && $$own/bin/python -m pytest tests/test_api.py || failed="$$failed $$version"; \
	done; test -z "$$failed" || { echo "failed with:$$failed" >&2; exit 1; }

optimizers: $(OPTIMIZERS)/.optimizers
	$(OPTIMIZERS)/bin/python -m tests.optimizers
	$(OPTIMIZERS)/bin/python -m tests.optimizers --third-party
	$(OPTIMIZERS)/bin/python -m tests.optimizers --third-party --killed

frameworks: $(TORCHREC)/.torchrec $(DEEPSPEED)/.deepspeed $(TORCHTITAN)/.torchtitan $(RAY)/.ray $(JAX)/.jax
	@# TorchRec warns when it is imported and used.
	$(TORCHREC)/bin/python -m pytest -n $(WORKERS) -W ignore::DeprecationWarning -W ignore::FutureWarning \
	    tests/adapters/torchrec
	@# Without an accelerator DeepSpeed looks for one, and warns at length.
	DS_ACCELERATOR=cpu $(DEEPSPEED)/bin/python -m pytest -n $(WORKERS) -W default tests/adapters/deepspeed
	@# torch warns of random numbers on CPUs, and of what torchdata calls.
	$(TORCHTITAN)/bin/python -m pytest -n $(WORKERS) -W default tests/adapters/torchtitan
	$(RAY)/bin/python -m pytest -rs -o faulthandler_timeout=900 tests/adapters/test_ray.py tests/adapters/test_actor.py
	$(JAX)/bin/python -m pytest -n $(WORKERS) tests/adapters/jax

# A virtual environment of make's own has the torch of constraints.txt, which is for the CPU.
gpu:
	CUBLAS_WORKSPACE_CONFIG=:4096:8 $(PYTHON) -m pytest -rs tests/session/test_gpu.py tests/checkpoint
	CUBLAS_WORKSPACE_CONFIG=:4096:8 $(PYTHON) -m tests.optimizers --device cuda

man: $(VENV)/.dev
	$(BIN)/scarctl help --man > docs/scarctl.1

pictures: $(VENV)/.dev
	$(BIN)/python docs/site/pictures.py

# Warnings are errors. This one is about a program that this project does not use.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(DOCS)/.docs
	$(DOCS)/bin/mkdocs build --strict

package: $(DOCS)/.docs
	rm -rf dist
	$(DOCS)/bin/python -m build --no-isolation
	$(DOCS)/bin/twine check --strict dist/*

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	@failed=; for file in $(BENCHMARKS); do \
	    echo "== $$file"; $(BIN)/python "$$file" || failed="$$failed $$file"; done; \
	test -z "$$failed" || { echo "not run to the end:$$failed" >&2; exit 1; }

kills: $(VENV)/.dev
	$(BIN)/python benchmarks/kills.py

ettr: $(VENV)/.dev
	$(BIN)/python benchmarks/ettr.py

ettr-quick: $(VENV)/.dev
	$(BIN)/python benchmarks/ettr.py --quick

torture: $(VENV)/.dev
	$(BIN)/python -m tests.adversarial.torture --rounds $(ROUNDS) --seed $(SEED) --keep

soak: $(VENV)/.dev
	$(BIN)/python benchmarks/soak.py --minutes $(MINUTES)

attack: $(VENV)/.dev
	@set -e; for name in $(ATTACKS); do echo "== $$name"; $(BIN)/python -m tests.adversarial.$$name; done
	$(if $(filter power,$(ATTACKS)),$(BIN)/python -m tests.adversarial.power --mutants)

ceph: $(VENV)/.dev
	$(BIN)/python -m tests.store.conformance.real_server

clean:
	rm -rf $(VENV) $(OLDEST) $(OPTIMIZERS) $(TORCHREC) $(DEEPSPEED) $(TORCHTITAN) $(RAY) $(JAX) $(DOCS) $(PYTHON_OF)-* build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp per set of extras; the development set contains the one for the examples.
$(VENV)/.dev: $(SETUP) | $(BIN)/python
	$(INSTALL) '.[dev]'
	@touch $(VENV)/.examples $(VENV)/.paper $@

# Imports once what each worker of `unit` imports: without this, all of them would compile it at the same time.
$(VENV)/.compiled: $(VENV)/.dev
	@-$(BIN)/python -c "import lightning.pytorch, moto.server, s3fs, torch._dynamo, torch.distributed.run, transformers.trainer" >/dev/null 2>&1
	@-$(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1
	@touch $@

$(VENV)/.examples: $(SETUP) | $(BIN)/python
	$(INSTALL) .
	@touch $@

$(VENV)/.paper: $(SETUP) | $(BIN)/python
	$(INSTALL) '.[paper]'
	@touch $@

$(OLDEST)/.oldest: pyproject.toml constraints-oldest.txt | $(BIN)/python
	$(BIN)/python -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt -e \
	    '.[accelerate,jax,lightning,transformers]' flax hypothesis optax orbax-checkpoint peft 'pytest>=9' pytest-timeout \
	    pytest-xdist
	@touch $@

$(OPTIMIZERS)/.optimizers: $(SETUP) constraints-optimizers.txt | $(BIN)/python
	$(BIN)/python -m venv $(OPTIMIZERS)
	$(OPTIMIZERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . expecttest transformers
	$(OPTIMIZERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-optimizers.txt
	@touch $@

# TorchRec's named requirements are not on PyPI (fbgemm-gpu for CPUs has another name), or too old: see the file.
$(TORCHREC)/.torchrec: $(SETUP) constraints-torchrec.txt | $(BIN)/python
	$(BIN)/python -m venv $(TORCHREC)
	$(TORCHREC)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . hypothesis pytest \
	    pytest-timeout pytest-xdist
	$(TORCHREC)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-torchrec.txt
	@touch $@

# Without isolation, because its setup imports torch; and without compiling its kernels.
$(DEEPSPEED)/.deepspeed: $(SETUP) constraints-deepspeed.txt | $(BIN)/python
	$(BIN)/python -m venv $(DEEPSPEED)
	$(DEEPSPEED)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . hypothesis psutil \
	    pydantic pytest pytest-timeout pytest-xdist setuptools tqdm
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(DEEPSPEED)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	    --no-build-isolation -r constraints-deepspeed.txt
	@touch $@

# The last four without what they ask for: see the file.
$(TORCHTITAN)/.torchtitan: $(SETUP) constraints-torchtitan.txt | $(BIN)/python
	$(BIN)/python -m venv $(TORCHTITAN)
	$(TORCHTITAN)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -c constraints-torchtitan.txt \
	    -e . dill httpx huggingface_hub hypothesis multiprocess pandas pyarrow pytest pytest-timeout pytest-xdist requests \
	    tensorboard tokenizers torchdata tyro
	$(TORCHTITAN)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-torchtitan.txt --no-deps \
	    datasets spmd_types torchtitan triton
	@touch $@

$(JAX)/.jax: $(SETUP) constraints-jax.txt | $(BIN)/python
	$(BIN)/python -m venv $(JAX)
	$(JAX)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -c constraints-jax.txt -e '.[jax]' \
	    flax hypothesis optax orbax-checkpoint pytest pytest-timeout pytest-xdist
	@touch $@

$(RAY)/.ray: $(SETUP) constraints-ray.txt | $(BIN)/python
	$(BIN)/python -m venv $(RAY)
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -c constraints-ray.txt \
	    -e . 'ray[train]' hypothesis pytest pytest-timeout pytest-xdist
	@touch $@

$(DOCS)/.docs: constraints-docs.txt | $(BIN)/python
	$(BIN)/python -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-docs.txt
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "scarctl needs Python 3.10 or newer, and '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)" >&2; \
	    echo "name another one: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	    echo "'$(PYTHON) -m venv' failed: Debian and Ubuntu keep it in the package python3-venv" >&2; exit 1; }
	@# The pip of an older Python needs minutes to choose the versions, and this one half of one.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --upgrade pip || { rm -rf $(VENV); exit 1; }
