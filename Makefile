# `make cpu` needs only Debian, root and Python 3.11: it creates .venv, starts a Docker Engine if none responds, and runs
# `envbuild make cpu`. `make help` lists all targets.
PYTHON ?= python3
BIN := .venv/bin
# Tests run in parallel, the longest first; tests/conftest.py decides which tests that use the engine share a worker.
# Tests of the engine often wait, so there are more workers than cores. A test that takes 20 minutes ends its worker,
# with the stacks of its threads; a new worker would run that test again.
PARALLEL := -n $(shell echo $$(($$(nproc) + 2))) --dist loadscope --no-loadscope-reorder --max-worker-restart=0 \
	-o faulthandler_timeout=1200 -o faulthandler_exit_on_timeout=true
# The tests start hundreds of programs, each of which would compile envbuild again.
unexport PYTHONDONTWRITEBYTECODE
TARGETS := help venv docs engine engine-stop browser test test-images test-apex test-compiled test-kubernetes test-elsewhere unit lint format bench faults fuzz chaos endurance explain-score pretend pretend-plan pretend-host wrong-kernels injections clean-runs probe-versions \
	gpu-check gpu-wheels clean
PROFILES := $(sort $(notdir $(basename $(filter-out %.lock.yaml,$(wildcard profiles/*.yaml profiles/projects/*.yaml)))))
CLASH := $(filter $(TARGETS),$(PROFILES))
$(if $(CLASH),$(error a profile cannot be named like a target: $(CLASH)))

.DEFAULT_GOAL := help
.PHONY: $(TARGETS) $(PROFILES)

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  make <profile>    run envbuild make for a shipped profile: $(PROFILES)"
	@echo "                    TORCH_INDEX=pytorch: take torch's builds such as +cpu from PyTorch's own index"

# TORCH_INDEX=pytorch takes builds such as torch 2.13.0+cpu from PyTorch's own index; TORCH_INDEX=URL from a mirror.
$(PROFILES): venv engine
	PATH="$(CURDIR)/$(BIN):$$PATH" envbuild make $@ --allow-unproved $(if $(TORCH_INDEX),--torch-index "$(TORCH_INDEX)")

venv: .venv/.installed ## create the virtual environment .venv

.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

# pip compiles on one core, compileall on all. A file that does not compile here is one that nothing imports.
.venv/.dev: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
	@touch .venv/.installed $@

.venv/.docs: .venv/.installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@

docs: .venv/.docs ## build a site of the documents, site/index.html; broken links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "site/index.html; to read it with search: $(BIN)/python -m http.server --directory site"

engine: venv ## start a private Docker Engine, unless an engine responds (Debian, root)
	@scripts/engine start

engine-stop: ## stop the private engine
	@scripts/engine stop

browser: ## install Chromium for the tests of the page of `show --html`, if possible (Debian, root)
	@scripts/browser

test: .venv/.dev engine browser ## run all tests, including the end-to-end tests on a real engine
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest $(PARALLEL) --durations=20

test-images: .venv/.dev engine ## build, audit and remove the images of all project profiles and of h20-cu12, 5 GB each; push, rebuild and pin one; compile an extension for the real torch; fix environments with the real torch 2.3.1; read a layout with umoci, buildah and podman
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -m images tests/e2e

test-apex: .venv/.dev engine ## build the images of h20 and h200 with apex compiled, each twice; APEX_GIT=<URL> replaces apex's repository
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -m compiles tests/e2e/test_apex.py

test-compiled: .venv/.dev engine ## compile deepspeed and flash-attn as `lock` proposes, and load them in the image (over an hour)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -m compiles tests/e2e/test_compiled_packages.py

test-kubernetes: .venv/.dev engine ## test --on kubernetes in a real cluster of one node; compiles Kubernetes first (10 min, once)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -m kubernetes tests/e2e

unit: .venv/.dev ## run the tests that need no engine, without those marked slow
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow" tests/unit tests/selftest tests/pretend

test-elsewhere: ## run `make unit` in a copy of the tracked files with its own .venv; its path contains `envbuild` and a space
	@top=$$(mktemp -d) && copy="$$top/my envbuild/check out" && trap 'rm -rf "$$top"' EXIT && mkdir -p "$$copy" && \
	git checkout-index --all --prefix="$$copy/" && $(MAKE) -C "$$copy" unit

lint: .venv/.dev ## check the code with ruff, mypy --strict and scripts/plain_words.py
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/plain_words.py

format: .venv/.dev ## format the sources with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.dev engine ## run the benchmarks of start-up, forking, installing and builds (an hour); results in benchmarks/results
	for one in startup forking install_time build; do PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python benchmarks/$$one.py || exit; done

probe-versions: .venv/.dev ## raise the version of each probe whose code changed; evidence made with its old version no longer counts
	PYTHONPATH=tests $(BIN)/python tests/selftest/probe_versions.py

faults: .venv/.dev ## run the self-test with each seeded fault, and 50 times without; result in benchmarks/results
	$(BIN)/python benchmarks/faults.py

wrong-kernels: .venv/.dev ## count how many independently written wrong kernels the self-test detects; result in benchmarks/results
	$(BIN)/python benchmarks/kernel_score.py

injections: .venv/.dev ## measure the detection rate with 100000 faults of a published fault model; continues an interrupted run; result in benchmarks/results
	$(BIN)/python benchmarks/injections.py

clean-runs: .venv/.dev ## count false alarms in 1000 (RUNS=N) runs of the sampled probes, each with its own seed; adds to earlier runs; result in benchmarks/results
	$(BIN)/python benchmarks/clean_runs.py $(if $(RUNS),--runs $(RUNS))

pretend: .venv/.dev ## run the self-test's GPU code on eight simulated GPUs; `make test` runs a part; result in benchmarks/results
	$(BIN)/python tests/pretend/campaign.py

pretend-plan: .venv/.dev ## run the whole plan of gpu-check on a simulated H100; `make test` runs a part; result in benchmarks/results
	$(BIN)/python tests/pretend/plan_trial.py

pretend-host: .venv/.dev ## measure the seconds that level standard spends on the host, with a simulated H100; result in benchmarks/results
	$(BIN)/python tests/pretend/host_time.py

fuzz: .venv/.dev ## feed 200000 hostile inputs to all parsers; `make test` runs a part; result in benchmarks/results
	$(BIN)/python tests/fuzz/campaign.py

chaos: .venv/.dev engine ## inject 332 faults: envbuild, engine and registry killed, a faulty index; needs root and 30 GB; `make test` runs a part
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/chaos/campaign.py

endurance: .venv/.dev engine ## test full disks, low memory, parallel runs and 220 makes in a row (over an hour); PARTS=disks runs one part; result in benchmarks/results
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/endurance/campaign.py $(PARTS)

explain-score: .venv/.dev ## measure precision and recall of `envbuild explain`; result in benchmarks/results
	$(BIN)/python benchmarks/explain_score.py

gpu-check: ## test this machine's GPU for half an hour, in three blocks (BLOCK=N: only block N); results in benchmarks/results/gpu
	$(PYTHON) benchmarks/gpu_check.py $(if $(BLOCK),--block $(BLOCK))

# zstandard, which only compressing and decompressing image layers needs, is left out to keep the files small.
GPU_PYTHON ?= 3.12
gpu-wheels: ## download envbuild's locked dependencies to .gpu-wheels, for a GPU machine without a network (GPU_PYTHON=3.12)
	rm -rf .gpu-wheels && mkdir .gpu-wheels
	sed '/^zstandard==/,/# via/d' requirements.txt > .gpu-wheels/requirements.txt
	$(PYTHON) -m pip download --quiet --dest .gpu-wheels --only-binary=:all: --no-deps --require-hashes \
		-r .gpu-wheels/requirements.txt --python-version $(GPU_PYTHON) --implementation cp \
		$(foreach name,_2_34 _2_31 _2_28 _2_27 _2_26 _2_24 _2_17 2014 1,--platform manylinux$(name)_x86_64)
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir .gpu-wheels .
	@size=$$(du -sm .gpu-wheels | cut -f1) && echo "$$size MiB in .gpu-wheels" && test $$size -lt 37

clean: ## remove .venv and files that tools left in the checkout; for images and caches: envbuild prune
	rm -rf .venv dist build site .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
