# `make train` and `make test` need Python >= 3.10 and PyPI, nothing else.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
TORCH  ?= $(shell sed -n 's/^torch==/torch==/p' constraints.txt)

.PHONY: train test test-slow lint clean

train: $(VENV)/installed
	$(BIN)/torchrun recipes/llama_2d.py --dp 4 --tp 2

test: $(VENV)/tools
	$(BIN)/pytest -m "not slow"

test-slow: $(VENV)/tools
	$(BIN)/pytest -m slow

lint: $(VENV)/tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch goes first and alone, so that no dependency can pull another build of it.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/tools: $(VENV)/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) runs build *.egg-info
