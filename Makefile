# make setup   make .venv with the toolkit and the kernel (again: no cost)
# make run     take verify_attn through the phases of playbooks/local.yaml on this machine
# make test    run the tests
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.setup-stamp
# One word that changes when anything setup depends on changes: content, never mtimes.
INPUTS := pyproject.toml constraints.txt kernels/verify_attn/pyproject.toml Makefile

.PHONY: setup run test

setup:
	@want="$$(cat $(INPUTS) | sha256sum | cut -d' ' -f1)"; \
	if [ "$$(cat $(STAMP) 2>/dev/null)" != "$$want" ]; then \
	  set -e; \
	  [ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV); \
	  $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt 'setuptools>=68' wheel; \
	  $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[test]' -e kernels/verify_attn; \
	  echo "$$want" > $(STAMP); \
	fi

run: setup
	$(BIN)/phase run build-parity -p playbooks/local.yaml

test: setup
	$(BIN)/python -m pytest
