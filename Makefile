# SPDX-License-Identifier: Apache-2.0
# `make help` lists the targets. Everything they need they install themselves (apt; linters by pip into build/venv).

PY := /usr/bin/python3
RUN := PYTHONPATH=tests:lib $(PY)
VENV := build/venv
N ?= 2
RELEASE ?= mixed
SUITES ?= python platforms
FILES ?= tests/real
VERSION = $(shell cat '$(SRC)/src/im_mad/remotes/VERSION')
SHELL := /bin/bash

.PHONY: help quick lint types unit unit-early unit-late provision provision-full platform-root test test-full test-platforms real-oned test-real real-upgrade mutants demo replay bench docs dist deb rpm provision-packaging lab-up lab-down clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

quick: ## lint, types, unit tests, all at once: the inner loop; under 50 s, no root
	@$(MAKE) --no-print-directory --jobs=4 --output-sync=target lint types unit-early unit-late

lint: $(VENV)/ready
	@tests/lint.sh

types: $(VENV)/ready
	@tests/types.sh

unit:
	@$(PY) -m pytest -q tests/unit

# The same in two, about as long, for two cores.
LATE := $(wildcard tests/unit/test_p[o-z]*.py tests/unit/test_[q-z]*.py)

unit-early:
	@$(PY) -m pytest -q $(filter-out $(LATE),$(wildcard tests/unit/test_*.py)) tests/unit/plan

unit-late:
	@$(PY) -m pytest -q $(LATE)

$(VENV)/ready: tests/requirements-lint.txt
	@tests/venv.sh $(VENV) $<

provision: ## install what tests and demo need (Debian 12, root)
	@tests/lab/provision.sh

# A host like EL (tests/platforms/el.py) has the sudo of 11.
platform-root: provision $(VENV)/ready ## have the programs of Debian RELEASE (11, 13, or test-platforms') for nodes of labs, below build/roots; some minutes, once
	@$(RUN) -m lab root $(RELEASE) $(if $(filter mixed,$(RELEASE)),11)

test: provision-packaging platform-root ## all suites: some 25 minutes on two quiet cores; what they cost is said at the end
	@$(RUN) tests/suites.py

provision-full: ## install what make test-full needs, a Rust toolchain too
	@tests/lab/provision.sh full

test-full: provision-full provision-packaging platform-root ## all suites with all points and tests, the fuzzers at length
	@$(RUN) tests/suites.py --full

test-platforms: platform-root ## SUITES with nodes of RELEASE=11, 13, or mixed: 13 beside this machine's; ceph18: a cluster of 13; noted in docs/runs
	@SEMISHARED_PLATFORM=$(RELEASE) $(RUN) tests/runs.py "debian-$(RELEASE)" "$(if $(filter ceph18,$(RELEASE)),Debian 12 with Ceph 18.2,Debian $(RELEASE))" $(SUITES:%=build/junit-%.xml) -- \
	$(PY) tests/suites.py $(SUITES)

real-oned: provision ## build the OpenNebula of SRC=<its checkout at a tag> in a root of its own, below build/real (some ten minutes)
	@tests/real/root.sh build "$(SRC)"

test-real: provision ## the tests of tests/real, or FILES of them, under the OpenNebula of SRC=<its checkout at a tag>; noted in docs/runs
	@$(RUN) tests/runs.py "opennebula-$(VERSION)" "OpenNebula $(VERSION)" build/junit-real.xml -- \
	tests/real/root.sh run "$(SRC)" env PYTHONPATH=tests:lib $(PY) -m pytest -q -p no:cacheprovider --durations=5 \
	--junitxml=build/junit-real.xml $(FILES)

real-upgrade: provision ## upgrade the OpenNebula of SRC, with VMs of ours, to those of THROUGH="SRC SRC", one after the other
	@kept=$$(for source in $(THROUGH); do tests/real/root.sh build "$$source" || exit 1; done) && \
	$(RUN) tests/runs.py "upgrade-$(VERSION)" "OpenNebula $(VERSION), then $$(basename -a $$kept | xargs)" build/junit-upgrade.xml -- \
	tests/real/root.sh run "$(SRC)" env PYTHONPATH=tests:lib THROUGH="$$kept" \
	$(PY) -m pytest -q -s -p no:cacheprovider --junitxml=build/junit-upgrade.xml tests/real/test_upgrade.py

mutants: provision ## put 200 small faults into the package, one at a time, and say which no test notices; goes on where it stopped
	@$(RUN) -m mutants

replay: provision ## recordings of a real oned against the simulated one and against the drivers
	@$(RUN) tests/suites.py replay

demo: provision ## two hosts, four VMs, persistent and non-persistent disks: one table
	@$(RUN) -m lab.demo

bench: provision ## measure; JSON in build/bench.json, plots beside it
	@$(RUN) bench/run.py

docs: $(VENV)/ready ## write the generated pages and pictures of docs, manual pages and completion
	@$(PY) docs/generate.py

dist: ## write the source archive of this commit into build/dist, with its checksum; the same bytes everywhere
	@packaging/dist.sh

provision-packaging: ## install what make deb, make rpm and the suite packages need
	@tests/lab/provision.sh packaging

deb: provision-packaging ## build Debian's packages of this commit, for front-end and hosts, into build/deb
	@packaging/deb.sh

rpm: provision-packaging ## build RPM's, into build/rpm
	@packaging/rpm.sh

lab-up: provision ## a lab of N hosts that stays: make lab-up N=4
	@$(RUN) -m lab up $(N)

lab-down: ## end it
	@$(RUN) -m lab down

clean: ## remove build/, but roots of other Debian releases
	@[ ! -d build ] || find build -mindepth 1 -maxdepth 1 ! -name roots -exec rm -rf {} +
