# Two commands do everything on a machine that has Python and make: `make demo` and `make test`.
# EXTRAS=cuda adds what a GPU needs. Paths are relative, so the checkout may lie in a directory with spaces.

PYTHON ?= python3
EXTRAS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

empty :=
space := $(empty) $(empty)
comma := ,
comma_list = $(subst $(space),$(comma),$(strip $(1)))
BASE := .venv/installed$(EXTRAS:%=-%)
DEV := .venv/installed-dev$(EXTRAS:%=-%)

# Compiled files are kept, whatever the environment says: the processes of the tests read them again and again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow test-hardware lint docs clean
.DELETE_ON_ERROR:

demo: $(BASE)
	$(BIN)/python recipes/digits_cnn.py

test: lint
	$(BIN)/python -m pytest -m "not slow" --by-turns -n 2 --dist worksteal

# What `make test` leaves out. CI takes turns here too.
LEFT_OUT ?= -m "slow or one_in"
test-slow: $(DEV)
	$(BIN)/python -m pytest $(LEFT_OUT) -n 2 --dist worksteal

# The tests that depend on the hardware, with another one in its place. Plans decide for it; the kernels run on this one,
# but oneDNN's can be limited to AVX2. A plan of "auto" is mixed_bfloat16 and XLA on an A100, and mixed_bfloat16 with AMX:
# the tests of the step name their precision, so AMX changes none of them.
HARDWARE_TESTS := $(BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal
PLANS := tests/training/test_compile.py tests/training/test_plan.py tests/runner tfopt/runner
test-hardware: $(DEV)
	@echo "pretending an A100"
	@TFOPT_PRETEND_HARDWARE=A100 $(HARDWARE_TESTS) $(PLANS) tests/training/step tfopt/training tfopt/hardware
	@echo "pretending AMX"
	@TFOPT_PRETEND_HARDWARE=amx $(HARDWARE_TESTS) $(PLANS)
	@echo "oneDNN's kernels with AVX2 only"
	@TFOPT_PRETEND_HARDWARE=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(HARDWARE_TESTS) \
		tests/test_hardware.py tests/exporting/int8 tests/exporting/weight_only

lint: $(DEV)
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports

docs: $(DEV)
	$(PIP) --editable ".[docs]"
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf .venv build dist site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

.venv/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; (3, 11) <= v < (3, 14) or sys.exit("tfopt needs Python 3.11 to 3.13. Received: %d.%d. Set PYTHON=python3.12, for example." % v[:2])'
	@echo "creating the environment in .venv"
	@$(PYTHON) -m venv .venv

$(BASE): pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing tfopt and what it needs, a few minutes the first time"
	@$(PIP) --editable ".$(if $(EXTRAS),[$(call comma_list,$(EXTRAS))])"
	@touch $@

$(DEV): pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing tfopt and its development tools, a few minutes the first time"
	@$(PIP) --editable ".[$(call comma_list,dev $(EXTRAS))]"
	@touch $@ $(BASE)
