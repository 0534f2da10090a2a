# Each line is a command of tools/run.py; environments, suites of tests and flags are in
# the tables of tools/environments.py and tools/tasks.py.
PYTHON ?= python3
RUN := @$(PYTHON) tools/run.py
TEST = $(RUN) test --jobs=$(or $(JOBS),2) --suites="$(SUITES)" --extras="$(EXTRAS)"

.PHONY: help generate test test-oldest test-newest lint types docs machine-code \
  code-objects wheel tunix bench rollouts peers clean

help: ; $(RUN) --help
generate: ; $(RUN) generate $(MODEL)
test: ; $(TEST) $(PYTEST_ARGS)
test-oldest: ; $(TEST) --jax=oldest $(PYTEST_ARGS)
test-newest: ; $(TEST) --jax=newest $(PYTEST_ARGS)
lint: ; $(RUN) lint
types: ; $(RUN) types
docs: ; $(RUN) docs
machine-code: ; $(RUN) machine-code $(PYTEST_ARGS)
code-objects: ; $(RUN) code-objects
wheel: ; $(RUN) wheel
tunix: ; $(RUN) tunix $(PYTEST_ARGS)
bench: ; $(RUN) bench
rollouts: ; $(RUN) rollouts $(ROLLOUTS)
peers: ; $(RUN) peers $(PEERS)
clean: ; $(RUN) clean
