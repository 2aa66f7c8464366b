SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

GO      ?= go
TOOL     = $(GO) tool -modfile=tools/go.mod
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
AGENT    = internal/image/embedded/holdpoint-agent

# Where `make install` puts things; the units go below UNITDIR.
PREFIX  ?= /usr/local
UNITDIR ?= $(PREFIX)/lib/systemd
DESTDIR ?=

# How long `make fuzz` spends on each fuzz test.
FUZZTIME ?= 30s

# What tests with real guests start from; `make image` fills it.
export HOLDPOINT_TEST_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/holdpoint-test

.PHONY: help setup build build-all image test test-fast test-systemd test-faults test-versions lint generate bench demo fuzz install clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | awk -F'\t' '{ printf "  make %-13s %s\n", $$1, $$2 }'

setup: ## Install what is missing (Debian 12, Ubuntu 24.04; asks for sudo unless root)
	@scripts/setup

build: ## Build bin/holdpoint with the guest agent in it
	CGO_ENABLED=0 GOOS=linux GOARCH=amd64 $(GO) build -trimpath -ldflags '-s -w' -o $(AGENT) ./cmd/holdpoint-agent
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-X main.version=$(VERSION)' -o bin/holdpoint ./cmd/holdpoint

image: setup build ## Build the Debian image that tests with real guests start from (kept; about 90 s the first time)
	@scripts/test-image

test: setup build image ## Set up, build and run every test: unit, script, real guests
	@scripts/test

test-fast: build ## Run the tests that need no real guest
	$(GO) test -short ./...

test-systemd: setup build image ## Run the test of machines whose init is systemd (builds their image once; about 5 minutes)
	@scripts/test-systemd

test-faults: build ## Stop every verb at each of its steps, in every way (about an hour)
	HOLDPOINT_TEST_MANY=1 $(GO) test -count=1 -timeout 3h -run '^TestFaultAtEveryStep$$' -v ./test/script

test-versions: setup build image ## Run the tests that want another QEMU and another kernel (downloads both once; about 20 minutes)
	@scripts/test-versions

lint: ## Check format, vet, staticcheck and the builds for macOS and Windows
	@test -z "$$($(TOOL) gofumpt -l $$(git ls-files '*.go' ':!api') | tee /dev/stderr)"
	$(GO) vet ./...
	$(TOOL) staticcheck ./...
	@for os in darwin windows; do echo "GOOS=$$os $(GO) build ./cmd/holdpoint ./client"; GOOS=$$os GOARCH=arm64 $(GO) build -o /dev/null ./cmd/holdpoint; GOOS=$$os $(GO) build ./client; done
	@for f in scripts/* .ci/run; do bash -n "$$f"; done

generate: ## Generate the API's code and docs/cli.md again
	cd api && $(GO) tool -modfile=../tools/go.mod buf lint && $(GO) tool -modfile=../tools/go.mod buf generate
	$(GO) test ./internal/cli -run TestDocs -update

bench: setup build image ## Measure, beside libvirt too; prints the table of docs/benchmarks.md
	@scripts/setup bench
	@$(GO) run ./bench -holdpoint bin/holdpoint

demo: setup build ## Run the story of the README with a real guest
	@scripts/demo

fuzz: ## Fuzz every parser of foreign bytes for FUZZTIME each
	@scripts/fuzz $(FUZZTIME)

install: build ## Install the binary and the systemd units below PREFIX
	install -D -m 0755 bin/holdpoint $(DESTDIR)$(PREFIX)/bin/holdpoint
	for scope in system user; do \
		install -d $(DESTDIR)$(UNITDIR)/$$scope; \
		sed 's|@bindir@|$(PREFIX)/bin|' packaging/systemd/$$scope/holdpoint.service > $(DESTDIR)$(UNITDIR)/$$scope/holdpoint.service; \
		chmod 0644 $(DESTDIR)$(UNITDIR)/$$scope/holdpoint.service; \
	done

clean: ## Remove what was built (the image of the tests stays)
	rm -rf bin $(AGENT)
