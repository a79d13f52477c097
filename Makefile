# A fresh machine needs Python 3.11 or newer and a C++17 compiler; everything else comes with pip.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BENCH ?= gemm train_step packing overhead tracing
BIN = $(VENV)/bin

# Every target says which extras it needs; the stamp remembers what is installed and for which sources.
SOURCES = pyproject.toml CMakeLists.txt $(wildcard ffi/* jax_xdna/*.py models/*.py aie_kernels/*.py)
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --quiet

.PHONY: finetune test bench lint clean

finetune: $(VENV)/.finetune
	$(BIN)/python -m models.finetune $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest $(ARGS)

bench: $(VENV)/.bench
	mkdir -p runs/bench
	for name in $(BENCH); do \
	  echo; echo "== $$name"; \
	  $(BIN)/python -m benchmarks.$$name --json runs/bench/$$name.json $(ARGS) || exit; done

lint: $(VENV)/.lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy jax_xdna
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files "*.h" "*.hpp" "*.cc")

$(VENV)/.%: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) ".[$*]"
	touch $@

clean:
	rm -rf $(VENV) build
