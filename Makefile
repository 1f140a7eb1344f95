# Every target creates the virtual environment it needs, with pinned versions.
VENV   ?= .venv
PYTHON ?= python3
PY     := $(VENV)/bin/python
BUILD  ?= build/dev
INSTALL = -m pip install -q --no-build-isolation --no-deps -e . -C build-dir=$(BUILD) \
          -C cmake.define.FAKEQUANT_BUILD_TESTS=ON

SOURCES := pyproject.toml CMakeLists.txt $(shell find csrc -name '*.cc' -o -name '*.h') \
           $(shell find src -name '*.py')

.PHONY: test test-all installed zoo fuzz demo docs bench build wheel-test lint stub test-kernels test-neon test-gpu test-torch \
  test-python clean

# The second run uses the Python nodes, as users of other torch releases do. Two test processes share the CPUs, so each
# has one thread of torch; tests that need two set their number.
test: export OMP_NUM_THREADS = 1
test: lint test-kernels $(VENV)/.docs
	$(PY) -m pytest -n 2 --dist worksteal $(if $(CI),--durations=50)
	FAKEQUANT_PYTHON_NODES=1 $(PY) -m pytest -n 2 --dist worksteal -q tests/operators --ignore tests/operators/test_fork.py

# Everything of which `make test` tries samples (tests/shared/thoroughness.py), and the whole zoo.
test-all: export OMP_NUM_THREADS = 1
test-all: export FAKEQUANT_TESTS = all
test-all: lint test-kernels $(VENV)/.docs
	$(PY) -m pytest -n 2 --dist worksteal --durations=50
	FAKEQUANT_PYTHON_NODES=1 $(PY) -m pytest -n 2 --dist worksteal -q tests/operators --ignore tests/operators/test_fork.py \
	  tests/compile/test_compile.py tests/compile/test_fusion.py tests/ranks/test_distill_runs.py

# Runs the whole flow on all models of tests/zoo; `make test` runs some of them.
zoo: export OMP_NUM_THREADS = 1
zoo: build $(VENV)/.installed
	FAKEQUANT_TESTS=all $(PY) -m pytest -n 2 --dist worksteal tests/zoo

# Runs random networks through the whole flow; `make test` runs some. make fuzz N=500 SEED=0
N    ?= 100
SEED ?= 0

fuzz: export OMP_NUM_THREADS = 1
fuzz: build $(VENV)/.installed
	$(PY) tests/fuzz/fuzz.py --networks $(N) --seed $(SEED) --scripts build/fuzz

demo: build
	$(VENV)/bin/fakequant demo

# Builds the pages in build/site; a warning is an error.
docs: build $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

$(VENV)/.docs: requirements-docs.txt $(VENV)/.installed
	$(PY) -m pip install -q -r requirements-docs.txt
	touch $@

# Tests the wheel and the sdist in environments that cannot see the sources. Uses the kernels that are already compiled;
# without --build-dir, the wheel is built from the sdist, as on a user's machine.
wheel-test: build $(VENV)/.installed
	$(PY) tools/wheel_test.py --build-dir $(BUILD)

bench: build $(VENV)/.installed
	mkdir -p benchmarks/results
	$(PY) benchmarks/bench_kernels.py --json benchmarks/results/latest.json
	$(PY) benchmarks/bench_torch.py --json benchmarks/results/latest-torch.json
	$(PY) benchmarks/bench_compile.py --json benchmarks/results/latest-compile.json
	$(PY) benchmarks/bench_quantizers.py --json benchmarks/results/latest-quantizers.json
	$(PY) benchmarks/bench_train_step.py --json benchmarks/results/latest-train-step.json
	$(PY) benchmarks/bench_format_step.py --json benchmarks/results/latest-format-step.json
	$(PY) benchmarks/digits.py --json benchmarks/results/latest-digits.json
	$(PY) benchmarks/digits_cnn.py --json benchmarks/results/latest-digits-cnn.json
	$(PY) benchmarks/digits_depthwise.py --json benchmarks/results/latest-digits-depthwise.json
	$(PY) benchmarks/digits_last_points.py --json benchmarks/results/latest-digits-last-points.json
	$(PY) benchmarks/digits_recurrent.py --json benchmarks/results/latest-digits-recurrent.json
	$(PY) benchmarks/bench_recurrent_export.py --json benchmarks/results/latest-recurrent-export.json
	$(PY) benchmarks/bench_deploy.py --json benchmarks/results/latest-deploy.json
	$(PY) benchmarks/digits_runtimes.py --json benchmarks/results/latest-digits-runtimes.json
	$(PY) benchmarks/ptq_digits.py --json benchmarks/results/latest-ptq-digits.json
	$(PY) benchmarks/ptq_text.py --json benchmarks/results/latest-ptq-text.json
	$(PY) benchmarks/text_rotated.py --json benchmarks/results/latest-text-rotated.json
	$(PY) benchmarks/bench_ptq_depth.py --json benchmarks/results/latest-ptq-depth.json
	$(PY) benchmarks/digits_formats.py --json benchmarks/results/latest-digits-formats.json
	$(PY) benchmarks/text_formats.py --json benchmarks/results/latest-text-formats.json
	$(PY) benchmarks/llama_cpp.py --json benchmarks/results/latest-llama-cpp.json
	$(PY) benchmarks/ptq_mobilenet.py --json benchmarks/results/latest-ptq-mobilenet.json
	$(PY) benchmarks/bench_zoo.py --json benchmarks/results/latest-zoo.json
	$(PY) benchmarks/bench_linear.py --json benchmarks/results/latest-linear.json
	$(PY) benchmarks/bench_runtimes.py --json benchmarks/results/latest-runtimes.json
	$(PY) benchmarks/text_recipes.py --json benchmarks/results/latest-text-recipes.json
	$(PY) benchmarks/bench_language_model.py --json benchmarks/results/latest-language-model.json
	$(PY) benchmarks/bench_language_model_export.py --json benchmarks/results/latest-language-model-export.json

build: $(VENV)/.built

# All that the tests need. With -j2, packages are installed while the extension is compiled.
installed: build $(VENV)/.docs

# .demo has what `make demo` needs, .installed the rest. torch is installed first and with its exact version, so that no
# dependency replaces a CPU build by another one. torchvision asks for another build, and is installed without its dependencies, where only the zoo looks for it.
$(VENV)/.demo: requirements-demo.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q torch==2.13.0
	$(PY) -m pip install -q -r requirements-demo.txt
	touch $@

$(VENV)/.installed: requirements-dev.txt requirements-runtimes.txt requirements-zoo.txt $(VENV)/.demo
	$(PY) -m pip install -q -r requirements-dev.txt
	$(PY) -m pip install -q --no-deps -r requirements-runtimes.txt
	$(PY) -m pip install -q --no-deps --target $(VENV)/zoo -r requirements-zoo.txt
	touch $@

$(VENV)/.built: $(VENV)/.demo $(SOURCES)
	@echo "Compiling takes two to five minutes on two cores, and less if little has changed."
	$(PY) $(INSTALL)
	touch $@

lint: build $(VENV)/.installed
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

# Regenerates the committed stub. The tests fail if it does not match the module.
stub: build
	$(PY) -m nanobind.stubgen -q -m fakequant._native -o src/fakequant/_native.pyi

# Runs every kernel on every instruction set of this machine, from C++.
test-kernels: build
	$(VENV)/bin/cmake --build $(BUILD) --target kernels_test
	$(BUILD)/kernels_test

# Runs the kernels for 64-bit ARM in an emulator and compares the results with this machine's, line by line.
# Needs Debian's g++-aarch64-linux-gnu and qemu-user.
test-neon: build
	$(VENV)/bin/cmake --build $(BUILD) --target kernels_test
	$(VENV)/bin/cmake -S . -B build/neon -G Ninja -DCMAKE_TOOLCHAIN_FILE=tools/aarch64.cmake \
	  -DFAKEQUANT_BUILD_TESTS=ON -DFAKEQUANT_BUILD_PYTHON=OFF -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV))/bin/ninja
	$(VENV)/bin/cmake --build build/neon --target kernels_test
	$(BUILD)/kernels_test --digest | sort > build/neon/here.txt & \
	  qemu-aarch64 build/neon/kernels_test --digest | sort > build/neon/there.txt && wait $$!
	diff build/neon/here.txt build/neon/there.txt
	@echo "$$(wc -l < build/neon/here.txt) passed, 0 failed"

# Runs the Triton kernels in Triton's interpreter and compiles them for several GPUs, without one. Takes about a minute.
test-gpu: export TRITON_INTERPRET = 1
test-gpu: export TRITON_CACHE_DIR = $(abspath build)/triton
test-gpu: build $(VENV)/.gpu
	timeout 600 $(PY) -m pytest -q tests/gpu

$(VENV)/.gpu: requirements-gpu.txt $(VENV)/.installed
	$(PY) -m pip install -q --no-deps -r requirements-gpu.txt
	touch $@

# Runs the test suite, or TESTS, with another torch release in a separate environment: make test-torch TORCH=2.15.0.
# pip's default index has CUDA builds (7 GB); set PIP_EXTRA_INDEX_URL to an index with CPU builds.
# Kernels that are already compiled in BUILD are reused; another PYTHON needs another BUILD.
TORCH      ?= 2.15.0
TORCH_VENV ?= build/torch-$(TORCH)-$(notdir $(PYTHON))
TESTS      ?= tests

test-torch: export OMP_NUM_THREADS = 1
test-torch: $(TORCH_VENV)/.built
	$(TORCH_VENV)/bin/python -m fakequant info
	$(TORCH_VENV)/bin/python -m pytest -n 2 --dist worksteal -q $(TESTS)

$(TORCH_VENV)/.installed: requirements-demo.txt requirements-dev.txt
	$(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip install -q torch==$(TORCH)
	$(TORCH_VENV)/bin/python -m pip install -q -r requirements-demo.txt -r requirements-dev.txt
	touch $@

$(TORCH_VENV)/.built: $(TORCH_VENV)/.installed $(SOURCES)
	$(TORCH_VENV)/bin/python $(INSTALL)
	touch $@

# Runs the tests that need only NumPy on another Python: make test-python PYTHON=python3.13.
# NUMPY=1.26.4 chooses the version of NumPy.
PYTHON_VENV ?= build/$(notdir $(PYTHON))$(if $(NUMPY),-numpy-$(NUMPY))

test-python:
	$(PYTHON) -m venv $(PYTHON_VENV)
	$(PYTHON_VENV)/bin/python -m pip install -q $(if $(NUMPY),numpy==$(NUMPY) ml_dtypes,-c requirements-demo.txt \
	  -c requirements-dev.txt numpy ml_dtypes) pytest pytest-xdist hypothesis scikit_build_core nanobind cmake ninja
	$(PYTHON_VENV)/bin/python -m pip install -q --no-build-isolation --no-deps -e . \
	  -C build-dir=$(PYTHON_VENV)/cmake -C cmake.define.FAKEQUANT_TORCH_NODES=OFF
	$(PYTHON_VENV)/bin/python -m fakequant info
	$(PYTHON_VENV)/bin/python -m pytest -n 2 --dist worksteal -q tests/backends tests/config \
	  tests/conformance tests/properties tests/packaging/test_import_and_info.py tests/packaging/test_stub.py

clean:
	rm -rf build dist $(VENV)
