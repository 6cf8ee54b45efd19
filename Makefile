# One command for each thing. Each makes .venv first, when it is missing or out of date.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/installed

# What another installation has exported must not reach into this one, nor a matplotlibrc of
# one's own into the book's figures.
unexport PYTHONPATH PYTHONHOME JUPYTER_PATH
export PIP_USER := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export MPLCONFIGDIR := $(CURDIR)/$(VENV)/matplotlib

# A step frees its tensors, and the next one makes them again. Unless it is told otherwise, glibc
# gives their memory back in between, which costs as much as some of the computing (notebook 02).
# The library itself leaves its process's allocator alone.
notebooks refresh lab live bench: export MALLOC_MMAP_THRESHOLD_ := 33554432
notebooks refresh lab live bench: export MALLOC_TRIM_THRESHOLD_ := 1073741824

.PHONY: help notebooks refresh lab test test-everywhere live mutants size lint format saved-cells bench clean
.PHONY: exercises answers course course-trial site browser-test soak
.NOTPARALLEL:

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /make \1|/p' Makefile | awk -F'|' '{printf "%-21s %s\n", $$1, $$2}'

notebooks: $(INSTALLED)  ## run every notebook into build/notebooks (ONLY=03 runs that one)
	@$(PY) tools/run_notebooks.py $(ONLY)

refresh: $(INSTALLED)  ## the same, and write the outputs back to notebooks/, to be committed
	@$(PY) tools/run_notebooks.py --refresh $(ONLY)

lab: $(INSTALLED)  ## open copies of the notebooks, kept in work/, in JupyterLab
	@$(PY) tools/work_copies.py
	@$(PY) -m jupyterlab --LabApp.default_url=/lab/tree/work --LabApp.news_url=None \
	    --LabApp.app_settings_dir=tools/lab \
	    --LabApp.check_for_updates_class=jupyterlab.handlers.announcements.NeverCheckForUpdate

test: lint  ## lint, unit tests, and the checks of notebooks that need no execution
	@$(PY) -m pytest -q

live: $(INSTALLED)  ## run the chapters and name shown code that was never entered (ONLY=03)
	@$(PY) tools/live_cells.py $(ONLY)

test-everywhere: $(INSTALLED)  ## the numerical tests, with the kernels of other processors
	@$(PY) tools/everywhere.py

mutants: $(INSTALLED)  ## break the module, place by place: each has to fail a test (ONLY="ranks roof")
	@$(PY) tools/mutants.py $(ONLY)

size: $(INSTALLED)  ## lines, files and names of the module, room by room
	@$(PY) tools/size.py

lint: $(INSTALLED)  ## ruff, on code and notebooks
	@$(PY) -m ruff check --quiet .
	@$(PY) -m ruff format --check --quiet . || { echo "Not formatted: make format"; exit 1; }

format: $(INSTALLED)  ## let ruff format code and notebooks, and fix what it can
	@$(PY) -m ruff check --fix --quiet . || true
	@$(PY) -m ruff format .
	@$(PY) tools/saved_cells.py

saved-cells: $(INSTALLED)  ## rewrite the notebooks' "@save" cells from the module
	@$(PY) tools/saved_cells.py

exercises: $(INSTALLED)  ## write what students fill in, notebooks/exercises, from tests/exercises
	@$(PY) tools/exercises.py

answers: $(INSTALLED)  ## try right and wrong answers to the exercises (ONLY="03 museum")
	@$(PY) tools/answers.py $(ONLY)

course: $(INSTALLED)  ## a folder for nbgrader, with the exercises to be graded (DIR=../course)
	@test -n "$(DIR)" || { echo "Which folder? For instance: make course DIR=../course"; exit 1; }
	@$(PY) tools/exercises.py --course "$(DIR)"

course-trial: $(INSTALLED)  ## install nbgrader; let it grade blank, solved and forged notebooks (ONLY=03)
	@$(PY) -m pip install -qq -c constraints.txt -e ".[teach]"
	@$(PY) tools/course_trial.py $(ONLY)

site: $(INSTALLED)  ## the book as a site, in build/site (D2LPAR_REPOSITORY=https://… adds buttons)
	@$(PY) -m pip install -qq -c constraints.txt -e ".[site]"
	@$(PY) tools/website.py

browser-test: $(INSTALLED)  ## click through the site and JupyterLab, in the system's Chromium
	@$(PY) -m pip install -qq -c constraints.txt -e ".[site,browser]"
	@$(PY) -m pytest -q -m browser --hang-limit=1200 tests/browser

soak: $(INSTALLED)  ## kill training at random moments: each run must end as if undisturbed (N=100)
	@$(PY) tools/soak.py $(or $(N),10)

bench: $(INSTALLED)  ## measure ours against torch's: ratios and goals (ONLY="ranks ddp" runs those)
	@$(PY) tools/bench.py $(ONLY)

clean:  ## remove what was built (.venv and work/ stay)
	@rm -rf build .pytest_cache .ruff_cache .hypothesis
	@find d2lpar tests tools benchmarks -name __pycache__ -type d -exec rm -rf {} +

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
	@echo "Installing into $(VENV) (a few minutes the first time)"
	@rm -f $@
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(PY) -m pip install -qq -c constraints.txt -e ".[dev]"
	@$(PY) -c 'import matplotlib.font_manager'  # once, and not in a notebook: it may take a minute
	@printf '%s' '$(CURDIR)' > $@
