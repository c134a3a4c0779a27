PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-kernels lint clean

# One virtual environment for everything, built once and again when what is to be installed changes.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,examples,bench]'
	touch $@

demo: $(READY)
	$(BIN)/python examples/digits.py --output outputs/digits $(DEMO_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Most tests wait for processes that start: two files at a time.
test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Which kernel a processor gets decides how products and sums round. What is bit for bit has to be so with any of them:
# these stand for processors that are not at hand.
EQUIVALENCE := tests/test_dear.py tests/test_dear_state.py tests/test_ea_pipe.py tests/test_pipe_sgd.py tests/test_selsync.py
test-kernels: $(READY)
	for kernels in MKL_CBWR=COMPATIBLE MKL_CBWR=AVX2 ATEN_CPU_CAPABILITY=default; do \
	  echo "$$kernels"; \
	  env $$kernels $(BIN)/python -m pytest -q -n 2 --dist loadfile -k "is_ddp or follows or uninterrupted" $(EQUIVALENCE) \
	    || exit 1; \
	done

clean:
	rm -rf $(VENV) outputs
