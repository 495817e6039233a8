# Every target sets up what it needs: .venv is made once, and again only when the pinned versions change.
.PHONY: help env quickstart test test-slow gpu-check lint format clean

PYTHON_ENV := .venv/bin/python
unexport PYTHONDONTWRITEBYTECODE  # tests start many processes: compiling once saves each of them half a second

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

env:  ## make the virtual environment .venv
	@scripts/make_env.sh

quickstart: env  ## train on digits by all-reduce and gossip; writes runs/report/quickstart.*
	$(PYTHON_ENV) -m scripts.reproduce table=quickstart
	$(PYTHON_ENV) -m scripts.tables table=quickstart
	$(PYTHON_ENV) -m scripts.figures figure=quickstart

test: env  ## run the fast tests: every behaviour once, real processes included
	$(PYTHON_ENV) -m pytest -n 4 --max-worker-restart=0 -m "not slow and not gpu"

test-slow: env  ## run the other tests: repetitions, many processes, Slurm, benchmarks' programs
	$(PYTHON_ENV) -m pytest -n 4 --max-worker-restart=0 -m "slow and not gpu"

gpu-check: env  ## check this machine's GPUs, or go on (CHECKS="races memory": only these); without one, what emulates it
	@$(PYTHON_ENV) -m tests.gpu $(MINUTES:%=minutes=%) $(RECORD:%=record=%) $(CHECKS:%=checks=%)

lint: env  ## check style
	$(PYTHON_ENV) -m ruff check
	$(PYTHON_ENV) -m ruff format --check

format: env  ## format the code
	$(PYTHON_ENV) -m ruff check --fix
	$(PYTHON_ENV) -m ruff format

clean:  ## remove the environment and caches; runs/ and results/ stay
	rm -rf .venv .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
