# Every command a person needs. `make` alone prints the targets and their variables.
# A `##` comment is the help of its target or variable. `:=`, because HOST, SET and the like may lie in the
# environment by chance; only what is written behind `make` counts.

PYTHON := python3##         Python 3.10 to 3.13 that makes the environment
VENV := .venv##             the environment, made and filled on first use
RECIPE := quickstart##      a name in recipes/ or a path
SET :=##                    recipe settings: SET="seq_length=8192 model.num_layers=4"; quote a value with spaces inside
BUDGET :=##                 device memory a run may use: BUDGET=24GiB
HOST_BUDGET :=##            host memory that offload may use
GPU :=##                    plan, sweep: this GPU and its memory: GPU=h100-80gb; default the one in the machine
MODES :=##                  plan, sweep: modes to compare: MODES="none full full+offload"
SEQ_MAX :=##                plan, sweep: longest length tried, in tokens
GRANULARITY :=##            plan, sweep: lengths tried are multiples of it
SEQ :=##                    plan: also say what a step of this length needs
WORLD :=##                  plan: ranks that share the training state; default 1
JSON :=##                   plan: write the numbers into this file
PLOT :=##                   plan: draw the longest contexts into this PNG
STEPS :=##                  sweep: optimizer steps a length must survive
AXIS :=##                   sweep: what is searched: seq_length (default) or micro_batch_size
OUT :=##                    folder of the sweep; default sweeps/<recipe name>, continued if it is there
PUBLISH :=##                sweep, report: PUBLISH=1 copies to results/ and appends to results/DECISIONS.md
A :=##                      compare: folder of the older sweep
B :=##                      compare: folder of the newer sweep
TOLERANCE :=##              compare: share of speed that may be lost; default 0.1
RUN_DIR :=##                folder of the run; default runs/<recipe name>, continued if it is there
NPROC :=##                  processes; default one per GPU, or one on CPU
LOGDIR := runs##            what tensorboard shows
HOST := localhost##         address tensorboard listens on
PORT := 6006##              port tensorboard listens on
JOBS := 2##                 tests run at a time
ARGS :=##                   test: more for pytest: ARGS="-k recipe"; bench: sections: ARGS="loop"

SHELL := /bin/sh
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install -qq --constraint constraints.txt
# What every program is told. SET is split by the shell, so quotes work in it; `set -f` keeps * and [ as they are.
quoted = '$(subst ','\'',$(1))'
WORDS = $(call quoted,$(RECIPE)) $(SET)
option = $(if $($(1)),--$(2) $(call quoted,$($(1))))
BUDGETS = $(if $(BUDGET),$(call quoted,budget=$(BUDGET))) $(if $(HOST_BUDGET),$(call quoted,host_budget=$(HOST_BUDGET)))
BUDGET_OPTIONS = $(call option,GPU,gpu) $(call option,BUDGET,budget) $(call option,HOST_BUDGET,host-budget)

.DEFAULT_GOAL := help
.PHONY: help install dev train plan sweep report compare gate tensorboard test test-slow lint bench

help: ## this text
	@echo 'make TARGET [VARIABLE=value ...]'
	@echo
	@sed -n 's/^\([a-z-]*\):[^#]*## /  \1|/p' Makefile | awk -F'|' '{ printf "%-14s%s\n", $$1, $$2 }'
	@echo
	@sed -n 's/^\([A-Z_]*\) := *\(.*\)## */  \1|\2|/p' Makefile | awk -F'|' '{ printf "%-14s%-12s%s\n", $$1, $$2, $$3 }'

install: $(VENV)/installed ## make the environment and install the pinned packages; nothing is done twice
	@echo 'Ready: $(VENV)'

dev: $(VENV)/installed-dev ## the same with what tests and lint need
	@echo 'Ready: $(VENV)'

$(PY):
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 10) <= v <= (3, 13) or sys.exit("Python 3.10 to 3.13 is needed, not %d.%d: make PYTHON=python3.11 ..." % v)'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(PY)
	@echo 'Installing the pinned packages into $(VENV) (a few minutes, once) ...'
	@$(PIP) --editable .
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(PY)
	@echo 'Installing the pinned packages, tests and lint included, into $(VENV) (a few minutes, once) ...'
	@$(PIP) --editable '.[dev]'
	@touch $(VENV)/installed $@

# `exec`: SIGTERM goes from make through the launcher to train.py, which saves and leaves.
train: $(VENV)/installed ## train RECIPE; a second call continues
	@set -f; $(PY) tools/prepare_data.py $(WORDS) $(BUDGETS)
	@set -f; exec $(PY) tools/launch.py $(WORDS) $(BUDGETS) $(call option,RUN_DIR,run-dir) $(call option,NPROC,processes)

plan: $(VENV)/installed ## predict longest context, memory and speed of every mode on a GPU, without that GPU
	@set -f; exec $(PY) tools/plan.py $(WORDS) $(BUDGET_OPTIONS) $(call option,MODES,modes) \
	    $(call option,SEQ_MAX,seq-max) $(call option,GRANULARITY,granularity) $(call option,SEQ,seq) \
	    $(call option,WORLD,world) $(call option,JSON,json) $(call option,PLOT,plot)

SWEEP = $(BUDGET_OPTIONS) $(call option,SEQ_MAX,seq-max) $(call option,GRANULARITY,granularity) \
    $(call option,STEPS,steps) $(call option,NPROC,processes) $(call option,OUT,out)

sweep: $(VENV)/installed ## measure the longest context of every mode under the budget; a second call continues
	@set -f; exec $(PY) tools/sweep.py $(WORDS) $(SWEEP) $(call option,MODES,modes) $(call option,AXIS,axis) \
	    $(if $(PUBLISH),--publish)

report: $(VENV)/installed ## write a sweep's table and pictures again, from its records
	@exec $(PY) tools/report.py $(call quoted,$(or $(OUT),sweeps/$(notdir $(RECIPE:.yaml=)))) $(if $(PUBLISH),--publish)

compare: $(VENV)/installed ## what changed from sweep A to sweep B; ends with an error when B is worse
	@test -n $(call quoted,$(A)) -a -n $(call quoted,$(B)) || { echo 'write A=sweeps/older B=sweeps/newer' >&2; exit 2; }
	@exec $(PY) tools/compare.py $(call quoted,$(A)) $(call quoted,$(B)) $(call option,TOLERANCE,tolerance)

gate: $(VENV)/installed ## measure whether RECIPE reaches its targets; ends with an error when it does not
	@set -f; exec $(PY) tools/gate.py $(WORDS) $(SWEEP)

tensorboard: $(VENV)/installed ## show runs in the browser: http://localhost:6006
	@exec $(VENV)/bin/tensorboard --load_fast=false --logdir $(call quoted,$(LOGDIR)) --host $(call quoted,$(HOST)) \
	    --port $(call quoted,$(PORT))

test: $(VENV)/installed-dev ## run the tests that take seconds
	@exec $(PY) -m pytest -n $(JOBS) $(ARGS)

test-slow: $(VENV)/installed-dev ## run the tests that take minutes
	@exec $(PY) -m pytest -m slow -n $(JOBS) $(ARGS)

lint: $(VENV)/installed-dev ## check style, format and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(VENV)/installed-dev ## measure what is claimed of speed: the loop around a step, modes, tiles, the search
	@exec $(PY) tools/bench.py $(ARGS)
