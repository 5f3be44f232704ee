# `make cpu` needs nothing but Debian, root and Python 3.11: it makes .venv, starts an engine if none answers, and runs
# the main job. `make help` lists everything.
PYTHON ?= python3
BIN := .venv/bin
# Tests run in parallel, the longest first; tests/conftest.py decides which tests of the engine share a worker.
PARALLEL := -n $(shell echo $$(($$(nproc) + 1))) --dist loadscope --no-loadscope-reorder
TARGETS := help venv docs engine engine-stop browser test test-images test-apex test-kubernetes test-elsewhere unit lint format bench faults fuzz chaos endurance explain-score pretend pretend-plan pretend-host wrong-kernels injections clean-runs probe-versions \
	gpu-check gpu-wheels clean
PROFILES := $(sort $(notdir $(basename $(filter-out %.lock.yaml,$(wildcard profiles/*.yaml profiles/projects/*.yaml)))))
CLASH := $(filter $(TARGETS),$(PROFILES))
$(if $(CLASH),$(error a profile cannot be named like a target: $(CLASH)))

.DEFAULT_GOAL := help
.PHONY: $(TARGETS) $(PROFILES)

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  make <profile>    from a profile to a verified image: $(PROFILES)"
	@echo "                    TORCH_INDEX=pytorch: torch's builds such as +cpu come from PyTorch's own index"

# TORCH_INDEX=pytorch takes builds such as torch 2.13.0+cpu from PyTorch's own index; or the address of a mirror.
$(PROFILES): venv engine
	PATH="$(CURDIR)/$(BIN):$$PATH" envbuild make $@ --allow-unproved $(if $(TORCH_INDEX),--torch-index "$(TORCH_INDEX)")

venv: .venv/.installed ## the virtual environment, .venv

.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

.venv/.dev: .venv/.installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

.venv/.docs: .venv/.installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@

docs: .venv/.docs ## the documents as a site, site/index.html; broken links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "site/index.html; to read it with search: $(BIN)/python -m http.server --directory site"

engine: venv ## a Docker Engine: the one that answers, else a private one (Debian, root)
	@scripts/engine start

engine-stop: ## stop the private engine
	@scripts/engine stop

browser: ## Chromium for the tests of the report's page, where it can be installed (Debian, root)
	@scripts/browser

test: .venv/.dev engine browser ## every test, the end-to-end ones on a real engine included
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest $(PARALLEL) --durations=20

test-images: .venv/.dev engine ## the image of every project, 5 GB each: built, audited, removed; one of them pushed and made again
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -m images tests/e2e

test-apex: .venv/.dev engine ## the image of h200 with apex compiled for it, twice; APEX_GIT=<address> where its home is out of reach
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -m apex tests/e2e

test-kubernetes: .venv/.dev engine ## --on kubernetes in a real cluster of one node, compiled first (10 min, once)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -m kubernetes tests/e2e

unit: .venv/.dev ## the tests that need no engine
	$(BIN)/python -m pytest $(PARALLEL) tests/unit tests/selftest tests/pretend

test-elsewhere: ## the same in a copy of the tracked files, with its own .venv: its path holds `envbuild` and a space
	@top=$$(mktemp -d) && copy="$$top/my envbuild/check out" && trap 'rm -rf "$$top"' EXIT && mkdir -p "$$copy" && \
	git checkout-index --all --prefix="$$copy/" && $(MAKE) -C "$$copy" unit

lint: .venv/.dev ## ruff, mypy --strict and the list of idioms in scripts/plain_words.py
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/plain_words.py

format: .venv/.dev ## let ruff format the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.dev engine ## measure, side by side, an hour; results go to benchmarks/results
	for one in startup forking build; do PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python benchmarks/$$one.py || exit; done

probe-versions: .venv/.dev ## raise the version of each probe whose code changed: evidence of the one before no longer counts
	PYTHONPATH=tests $(BIN)/python tests/selftest/probe_versions.py

faults: .venv/.dev ## every seeded fault and 50 clean runs of the self-test; result in benchmarks/results
	$(BIN)/python benchmarks/faults.py

wrong-kernels: .venv/.dev ## how many wrong kernels the self-test finds that it was not written for; result in benchmarks/results
	$(BIN)/python benchmarks/kernel_score.py

injections: .venv/.dev ## detection rate: 100000 faults of a published model in the probes' operations; goes on where it was cut off; result in benchmarks/results
	$(BIN)/python benchmarks/injections.py

clean-runs: .venv/.dev ## false alarms: 1000 runs of the sampled probes, each with its own seed (RUNS=N: as many); adds to the runs of before; result in benchmarks/results
	$(BIN)/python benchmarks/clean_runs.py $(if $(RUNS),--runs $(RUNS))

pretend: .venv/.dev ## the self-test's paths for GPUs on eight simulated GPUs; `make test` has a slice; result in benchmarks/results
	$(BIN)/python tests/pretend/campaign.py

pretend-plan: .venv/.dev ## the plan of gpu-check, whole, on a simulated H100; `make test` has a slice; result in benchmarks/results
	$(BIN)/python tests/pretend/plan_trial.py

pretend-host: .venv/.dev ## seconds that level standard spends on the host, with a simulated H100; result in benchmarks/results
	$(BIN)/python tests/pretend/host_time.py

fuzz: .venv/.dev ## 200000 hostile inputs on all that is read; `make test` tries some of them; result in benchmarks/results
	$(BIN)/python tests/fuzz/campaign.py

chaos: .venv/.dev engine ## 332 faults: envbuild, engine and registry killed, a faulty index, 30 GB; `make test` has some of them (root)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/chaos/campaign.py

endurance: .venv/.dev engine ## full disks, no memory, many at once, 220 makes: an hour and more; PARTS=disks one of them; result in benchmarks/results
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/endurance/campaign.py $(PARTS)

explain-score: .venv/.dev ## precision and recall of `envbuild explain`; result in benchmarks/results
	$(BIN)/python benchmarks/explain_score.py

gpu-check: ## half an hour on this machine's GPU, in three blocks (BLOCK=1, 2 or 3: one); results in benchmarks/results/gpu
	$(PYTHON) benchmarks/gpu_check.py $(if $(BLOCK),--block $(BLOCK))

# Without zstandard, which only packing images needs: what is carried there may have 64 MiB, the checkout included.
GPU_PYTHON ?= 3.12
gpu-wheels: ## .gpu-wheels: envbuild and its locked dependencies, for a GPU machine without a network (GPU_PYTHON=3.12)
	rm -rf .gpu-wheels && mkdir .gpu-wheels
	sed '/^zstandard==/,/# via/d' requirements.txt > .gpu-wheels/requirements.txt
	$(PYTHON) -m pip download --quiet --dest .gpu-wheels --only-binary=:all: --no-deps --require-hashes \
		-r .gpu-wheels/requirements.txt --python-version $(GPU_PYTHON) --implementation cp \
		$(foreach name,_2_34 _2_31 _2_28 _2_27 _2_26 _2_24 _2_17 2014 1,--platform manylinux$(name)_x86_64)
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir .gpu-wheels .
	@size=$$(du -sm .gpu-wheels | cut -f1) && echo "$$size MiB in .gpu-wheels" && test $$size -lt 37

clean: ## remove .venv and what tools left in the tree; images and caches: envbuild prune
	rm -rf .venv dist build site .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
