# Everything a newcomer needs: `make demo` and `make test` set up .venv by themselves.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
TORCH  := torch==2.13.0
# torch comes first and by exact pin: an open range pulls gigabytes of other builds.
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help demo test lint sanitize bench format clean

help:
	@echo "make demo    install, then compare linear attention with softmax here (about a minute)"
	@echo "make test    install, then run every test"
	@echo "make lint    ruff and mypy"
	@echo "make sanitize  the native code under AddressSanitizer and UBSan"
	@echo "make bench   the benchmark tables of docs/"
	@echo "make format  rewrite the code in the house style"

$(VENV)/torch.stamp:
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH) numpy
	@touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml setup.py $(wildcard csrc/*.h csrc/*.cpp)
	$(PIP) -e '.[lab]'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/demo.stamp
	$(PIP) -e '.[lab,dev,hf]'
	@touch $@

demo: $(VENV)/demo.stamp
	$(BIN)/linattn info
	$(BIN)/linattn compare --html out/compare.html --json out/compare.json

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -n auto

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

sanitize: $(VENV)/demo.stamp
	$(BIN)/python csrc/test/sanitize.py

bench: $(VENV)/demo.stamp
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) build dist out src/*.egg-info
