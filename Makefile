# One command for each thing. Each makes .venv first, when it is missing or out of date.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/installed
TORCH_CPU := https://download.pytorch.org/whl/cpu

# What another installation has exported must not reach into this one, nor a matplotlibrc of
# one's own into the book's figures.
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE JUPYTER_PATH
export PIP_USER := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export MPLCONFIGDIR := $(CURDIR)/$(VENV)/matplotlib

# A step frees its tensors, and the next one makes them again. Unless it is told otherwise, glibc
# gives their memory back in between, which costs as much as some of the computing (notebook 02).
# The library itself leaves its process's allocator alone.
notebooks refresh lab bench: export MALLOC_MMAP_THRESHOLD_ := 33554432
notebooks refresh lab bench: export MALLOC_TRIM_THRESHOLD_ := 1073741824

.PHONY: help lab notebooks test clean exercises course course-trial site
.PHONY: refresh format mutants bench everywhere browser-test
.NOTPARALLEL:

help:
	@sed -n -e 's/^## /\n/p' -e 's/^\([a-z-]*\):.*## /  make \1|/p' Makefile \
	    | awk -F'|' '{ printf "%-20s%s\n", $$1, $$2 }'

## For readers

lab: $(INSTALLED)  ## open your copies of the notebooks (LAB="--port 9000")
	@$(PY) tools/work_copies.py
	@$(PY) -m jupyterlab --LabApp.default_url=/lab/tree/work --LabApp.news_url=None \
	    --LabApp.check_for_updates_class=jupyterlab.handlers.announcements.NeverCheckForUpdate \
	    --LabApp.app_settings_dir=tools/lab $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB)

notebooks: $(INSTALLED)  ## run every notebook into build/notebooks (ONLY="03 04")
	@$(PY) tools/run_notebooks.py $(ONLY)

test: $(INSTALLED)  ## check all: code, notebooks, exercises
	@$(PY) -m ruff check --quiet .
	@$(PY) -m ruff format --check --quiet . || { echo "Not formatted: make format"; exit 1; }
	@$(PY) -m pytest -q -n 2 --dist worksteal -m "not alone and not browser"
	@$(PY) -m pytest -q -m alone $$(grep -rl --include=*.py mark.alone tests)

clean:  ## remove what was built (.venv and work/ stay)
	@rm -rf build .pytest_cache .ruff_cache .hypothesis
	@find d2lpar tests tools benchmarks -name __pycache__ -type d -exec rm -rf {} +

## For teachers

exercises: $(INSTALLED)  ## write the exercises, try all answers (ONLY=03)
	@$(PY) tools/exercises.py
	@$(PY) -m pytest -q -n 2 tests/test_exercises.py --all-answers $(if $(ONLY),-k "$$(echo $(ONLY) | sed 's/ / or /g')")

course: $(INSTALLED)  ## write the exercises for nbgrader (DIR=../course)
	@test -n "$(DIR)" || { echo "Which folder? For instance: make course DIR=../course"; exit 1; }
	@$(PY) tools/exercises.py --course "$(DIR)"

course-trial: $(INSTALLED)  ## let nbgrader grade solved and forged ones (ONLY=03)
	@$(PY) -m pip install -qq -c constraints.txt -e ".[teach]"
	@$(PY) tools/course_trial.py $(ONLY)

site: $(INSTALLED)  ## build the site (D2LPAR_REPOSITORY=https://… adds buttons)
	@$(PY) -m pip install -qq -c constraints.txt -e ".[site]"
	@rm -rf build/site && $(PY) -m sphinx -qW --keep-going -c docs -d build/doctrees . build/site
	@echo "The site is in build/site: open build/site/index.html"

## For contributors

refresh: $(INSTALLED)  ## run notebooks, write their outputs back (ONLY=03)
	@$(PY) tools/run_notebooks.py --refresh $(ONLY)

format: $(INSTALLED)  ## format all; bring the module's code into "@save" cells
	@$(PY) -m ruff check --fix --quiet . || true
	@$(PY) -m ruff format --quiet .
	@$(PY) tools/saved_cells.py

mutants: $(INSTALLED)  ## break the module: each has to fail a test (ONLY=ranks)
	@$(PY) tools/mutants.py $(ONLY)

bench: $(INSTALLED)  ## measure ours against torch's (ONLY="ddp pipeline")
	@$(PY) benchmarks $(ONLY)

# Kernels of other processors, and other numbers of threads, add up in other orders.
TESTS ?= $(filter-out %_browser.py %_exercises.py %_notebooks.py %_packaging.py %_plot.py \
    %_project.py %_tools.py,$(wildcard tests/test_*.py tests/[a-z]*/))

everywhere: $(INSTALLED)  ## test the module with other kernels and threads (TESTS=tests/ranks)
	@for s in default:SSE41:SSE4_2:1 avx2:AVX2:AVX2:2 :ALL::2 :ALL::4; do \
	    IFS=:; set -- $$s; unset IFS; echo "== kernels: $${1:-the best}, threads: $$4"; \
	    env $${1:+ATEN_CPU_CAPABILITY=$$1 MKL_ENABLE_INSTRUCTIONS=$$3} ONEDNN_MAX_CPU_ISA=$$2 \
	        OMP_NUM_THREADS=$$4 MKL_DYNAMIC=FALSE \
	        $(PY) -m pytest -q --hypothesis-profile=random $(TESTS) || exit 1; \
	done

browser-test: $(INSTALLED)  ## click through site and JupyterLab, in Chromium
	@$(PY) -m pip install -qq -c constraints.txt -e ".[site,browser]"
	@$(PY) -m pytest -q -m browser --timeout=1200 tests/test_browser.py

# The stamp is written last, so that an interrupted installation is not taken for a whole one. It
# holds the folder's name: where that differs (the folder was moved or copied), or the Python that
# .venv was made with is gone, the stamp counts as missing.
ifneq ($(shell $(PY) -S -c "print(open('$(INSTALLED)').read())" 2>/dev/null),$(CURDIR))
.PHONY: $(INSTALLED)
endif

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Python 3.11 or newer is needed, and $(PYTHON) is not:" \
	        "install one, then for instance: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) cannot make virtual environments: install its venv module" \
	        "(Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	@rm -f $@
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing into $(VENV) (a few minutes the first time)"
	@if [ "$$(uname)" = Linux ] && ! command -v nvidia-smi >/dev/null \
	    && ! $(PY) -m pip config list | grep index >/dev/null; then \
	    echo "Without nvidia-smi: torch for CPUs, which is much smaller, from $(TORCH_CPU)"; \
	    $(PY) -m pip install -qq --no-deps --retries 1 -c constraints.txt -i $(TORCH_CPU) torch 2>/dev/null \
	        || echo "It cannot be had there. PyPI's torch is large: it comes with CUDA."; \
	fi
	@$(PY) -m pip install -qq -c constraints.txt -e ".[dev]"
	@$(PY) -c 'import matplotlib.font_manager'  # once, and not in a notebook: it may take a minute
	@printf '%s' '$(CURDIR)' > $@
