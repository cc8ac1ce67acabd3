# Everything a newcomer needs: `make demo` and `make test` set up .venv by themselves.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
TORCH  := torch==2.13.0
# torch comes first and by exact pin: an open range pulls gigabytes of other builds.
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

CPP_FILES := $(shell find csrc -name '*.h' -o -name '*.cpp')
# Everything the library is built from.
SOURCES := CMakeLists.txt $(wildcard cmake/*.cmake) $(filter-out csrc/test/%,$(CPP_FILES))
# cmake and ninja of the virtual environment, for pip and for CMake's presets.
export PATH := $(abspath $(BIN)):$(PATH)

# Where a machine forbids it, every process of the tests would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test native lint sanitize sanitize-threads check-clang check-neon bench figures docs format clean

help:
	@echo "make demo    install, then compare linear attention with softmax here (about a minute)"
	@echo "make test    install, then run every test, the lab's too"
	@echo "make native  rebuild what changed of the native library"
	@echo "make lint    ruff, mypy, clang-format and clang-tidy"
	@echo "make sanitize  the native code under AddressSanitizer and UBSan"
	@echo "make sanitize-threads  the native code under ThreadSanitizer"
	@echo "make check-clang  the native code built by clang++: its driver and its tests"
	@echo "make check-neon  the native code for aarch64, run in qemu"
	@echo "make bench   the benchmarks: every figure beside its bar"
	@echo "make figures  rerun the lab's published figures and say which moved (FIGURES='--all', '--only faces')"
	@echo "make docs    build the documentation site into out/site"
	@echo "make format  rewrite the code in the house style"

$(VENV)/torch.stamp:
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH) numpy 'scikit-build-core>=1' 'cmake>=3.20' 'ninja>=1.10'
	@touch $@

# Without build isolation: the same CMake every time, so that only what changed is compiled again.
$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml $(SOURCES)
	$(PIP) --no-build-isolation -e '.[pages]'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/demo.stamp lab/pyproject.toml
	$(PIP) --no-build-isolation -e '.[pages,hf,serve,notebooks,dev]'
	$(PIP) -e lab
	@touch $@

$(VENV)/docs.stamp: $(VENV)/demo.stamp
	$(PIP) --no-build-isolation -e '.[pages,docs]'
	@touch $@

native: $(VENV)/torch.stamp
	@test -f cmake/editable/CMakeCache.txt || $(MAKE) $(VENV)/demo.stamp
	$(BIN)/cmake cmake/editable > /dev/null
	$(BIN)/cmake --build cmake/editable

demo: $(VENV)/demo.stamp
	$(BIN)/linattn info
	$(BIN)/linattn compare --html out/compare.html --json out/compare.json

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -n auto --dist worksteal

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	$(BIN)/cmake --preset lint > /dev/null
	printf '%s\n' $(filter %.cpp,$(CPP_FILES)) | xargs -P $$(nproc) -n 1 $(BIN)/clang-tidy -p build/lint --quiet

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

sanitize: $(VENV)/demo.stamp
	$(BIN)/python csrc/test/check.py address

sanitize-threads: $(VENV)/demo.stamp
	$(BIN)/python csrc/test/check.py threads

check-clang: $(VENV)/dev.stamp
	$(BIN)/python csrc/test/check.py clang

check-neon: $(VENV)/demo.stamp
	$(BIN)/python csrc/test/check.py neon

bench: $(VENV)/dev.stamp
	$(BIN)/python benchmarks/run.py

figures: $(VENV)/dev.stamp
	$(BIN)/linattn lab figures $(FIGURES)

docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "out/site/index.html"

clean:
	rm -rf $(VENV) build dist out lab/src/*.egg-info
	git clean -fdXq cmake src/linattn/engines/native
