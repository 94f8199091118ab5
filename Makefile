# make setup   make .venv with the toolkit and the kernel (again: no cost)
# make run     take verify_attn through all four phases of playbooks/local.yaml on this machine, without asking (its playbook allows that)
# make check   lint, format and the tests that start nothing: half a minute, before every commit
# make reference   write docs/reference/ anew from the classes and commands it describes
# make test    run the tests: real sshd, routers and SGLang servers among them
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.setup-stamp
# One word that changes when anything setup depends on changes: content, never mtimes.
INPUTS := pyproject.toml constraints.txt kernels/verify_attn/pyproject.toml Makefile
PLAYBOOK := playbooks/local.yaml
WORKERS  ?= 2
QUICK    := tests/gate tests/playbook tests/analysis/test_records.py tests/ledger tests/test_house.py

# Before the setup: what this machine lacks, all at once, by the name apt knows it under.
NEEDED := lacks=""; \
	command -v git >/dev/null || lacks="$$lacks git"; \
	command -v "$${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || lacks="$$lacks g++"; \
	if ! command -v $(PYTHON) >/dev/null; then lacks="$$lacks python3 python3-venv"; \
	elif ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	  echo "$(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.12 ..." >&2; exit 1; \
	elif ! $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null; then \
	  lacks="$$lacks $$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"; \
	fi; \
	if [ -n "$$lacks" ]; then echo "this machine lacks what phasegate needs: apt-get install$$lacks" >&2; exit 1; fi

# Before a run: what it needs, what is here, and how long it will take. The figures are of playbooks/local.yaml (docs/results.md).
BEFORE_RUN := memory=$$(awk '/^MemAvailable:/ {print int($$2 / 1048576)}' /proc/meminfo 2>/dev/null); \
	disk=$$(df -Pk . | awk 'NR == 2 {print int($$4 / 1048576)}'); cores=$$(nproc 2>/dev/null || echo 1); \
	load=$$(cut -d' ' -f1 /proc/loadavg 2>/dev/null || echo unknown); \
	echo "make run: five SGLang workers on this machine's CPU, no GPU. Needs 12 GB of memory ($${memory:-unknown} available), 4 GB of disk ($$disk free), the network the first time."; \
	echo "Takes about 12 minutes on 2 quiet cores, 44 at a load of 8 to 19; here: $$cores cores, load $$load. The first time adds 2 to 4 minutes for SGLang and compiling."; \
	if [ "$${memory:-12}" -lt 11 ]; then echo "Less memory is available than the fleet takes: it may be killed. End what else runs."; fi

.PHONY: setup before-run run lint check test coverage reference

before-run:
	@if [ "$(PLAYBOOK)" = playbooks/local.yaml ]; then $(BEFORE_RUN); fi

setup:
	@want="$$(cat $(INPUTS) | sha256sum | cut -d' ' -f1)"; \
	if [ "$$(cat $(STAMP) 2>/dev/null)" != "$$want" ]; then \
	  $(NEEDED); \
	  set -e; \
	  echo "setting up $(VENV) (the first time takes a few minutes)"; \
	  $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV); \
	  $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt 'setuptools>=68' wheel; \
	  $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[test]' -e kernels/verify_attn; \
	  echo "$$want" > $(STAMP); \
	fi

# What a gate concluded is shown where a run ends; one that waits for review (exit 3) is where it is meant to stop, and make succeeds.
# On a machine where git knows nobody yet, this run (and nothing else) goes under the name of the login.
run: before-run setup
	@if ! git var GIT_COMMITTER_IDENT >/dev/null 2>&1; then \
	  who="$${USER:-$$(id -un)}"; \
	  echo "git does not know who you are; this run is recorded as $$who <$$who@localhost> (git config user.name, user.email)"; \
	  export GIT_AUTHOR_NAME="$$who" GIT_AUTHOR_EMAIL="$$who@localhost" GIT_COMMITTER_NAME="$$who" GIT_COMMITTER_EMAIL="$$who@localhost"; \
	fi; \
	$(BIN)/phase run --yes -p $(PLAYBOOK); code=$$?; \
	case $$code in 0|3|4|5|7) echo; $(BIN)/phase gate review -p $(PLAYBOOK);; esac; \
	case $$code in 0) echo; $(BIN)/phase status -p $(PLAYBOOK);; 3) ;; *) exit $$code;; esac

lint: setup
	$(BIN)/ruff check phases tests
	$(BIN)/ruff format --check -q phases tests

# A file's tests stay on one worker, all that start SGLang servers on the same one (tests/conftest.py).
check: lint
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup -m 'not slow and not fleet and not sglang' $(QUICK)

test: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

coverage: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --cov=phases --cov-report=term

reference: setup
	$(BIN)/python docs/reference/generate.py
