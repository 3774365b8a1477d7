# Every target but gpu sets up .venv itself: Python >= 3.11 and make are all that is needed. gpu installs nothing: it takes
# PYTHON as it is, with its torch, triton and pytest, writes to OUT and compares with the packages in PEERS, a folder. report
# makes a page of RESULTS, by default of all that lie in bench/results and OUT, in REPORT.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CHECKED := bench executors kernels models paged tests

OUT ?= bench/results/gpu

RESULTS ?= $(wildcard bench/results/*.json $(OUT)/*.json)
REPORT ?= build/report

.PHONY: demo test check format compile soak gpu report clean

demo: $(VENV)/installed-cli
	$(BIN)/paged generate

test: check
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: $(VENV)/installed-dev
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/mypy -p paged

format: $(VENV)/installed-dev
	$(BIN)/ruff format $(CHECKED)
	$(BIN)/ruff check --fix $(CHECKED)

compile: $(VENV)/installed-dev
	$(BIN)/python -m bench.compile

soak: $(VENV)/installed-dev
	$(BIN)/python -m tests.cache.soak --steps 1000000

gpu:
	$(PYTHON) -m bench.gpu --out $(OUT) $(if $(PEERS),--peers $(PEERS))

report: $(VENV)/installed-bench
	$(BIN)/python -m bench.report $(RESULTS) --out $(REPORT)

$(VENV)/installed-%: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$*]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks *.egg-info
