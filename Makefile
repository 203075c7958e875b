# The targets a person needs are build, demo, unit, check and test. `make help` lists all.

GO       ?= go
CACHE    := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/isthmus
GOVER    := $(shell $(GO) env GOVERSION)
VERSION  := $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
FUZZTIME ?= 3s
PEERTIME ?= 10s
# Most tests wait for servers and timers more than they compute, so twice as
# many packages as there are processors are tested at a time, and by make test
# three times as many.
PROCS    := $(shell getconf _NPROCESSORS_ONLN)
JOBS     ?= $(shell expr 2 '*' $(PROCS))
TESTJOBS ?= $(shell expr 3 '*' $(PROCS))
PKGS      = $(shell $(GO) list ./... | grep -v /test/)
# What starts several real servers at once runs on its own, after the tests of the packages, which run side by side.
ALONE    := ^Test(Container|Nacos|Rotation|MillionNames|EurekaMany|EtcdMany|ZooKeeperMany)$$

# Tools are built once per version, outside the repository, so that the next fresh clone finds them.
digest   = $(shell cat tools/$(1)/go.mod tools/$(1)/go.sum | cksum | cut -d' ' -f1)
LINT    := $(CACHE)/tools/lint-$(call digest,lint)-$(GOVER)
PROTO   := $(CACHE)/tools/proto-$(call digest,proto)-$(GOVER)
DOCS    := $(CACHE)/tools/docs-$(shell cksum < tools/docs/requirements.txt | cut -d' ' -f1)
RELEASE := $(CACHE)/tools/goreleaser-$(call digest,goreleaser)-$(GOVER)
VULN    := $(CACHE)/tools/vuln-$(call digest,vuln)-$(GOVER)
# Clones share what Go has compiled.
export GOFLAGS := $(strip $(GOFLAGS) -trimpath)
GOFILES  = $(shell find . -name '*.go' -not -name '*.pb.go' -not -path './.git/*')

.DEFAULT_GOAL := build
.DELETE_ON_ERROR:

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' Makefile

.PHONY: build
build: ## build bin/isthmus
	$(GO) build -trimpath -ldflags "-X main.version=$(VERSION)" -o bin/isthmus ./cmd/isthmus

.PHONY: demo
demo: build ## a generated registry, served, with its changes in the terminal
	./bin/isthmus demo

.PHONY: unit
unit: ## the fast tests, without real servers
	$(GO) test -short $(PKGS)

.PHONY: check
check: format vet lint deadcode tidy proto generated site vuln ## formatting, linters, generated files

# gotestsum prints a line for each package and, at the end, one of counts; with
# TIMES=1 the ten slowest packages and servers as well.
# With RERUN=1, as CI has it, up to five tests that fail run once more, alone:
# what passes then is reported by make unsteady and does not fail the run.
GOTESTSUM := $(GO) tool -modfile=tools/gotestsum/go.mod gotestsum --format pkgname --format-hide-empty-pkg --hide-summary skipped
UNSTEADY  := $(CACHE)/unsteady
again      = $(if $(RERUN),$(shell mkdir -p $(UNSTEADY))--rerun-fails=1 --rerun-fails-max-failures=5 --rerun-fails-run-root-test --rerun-fails-report $(UNSTEADY)/$(1))
TESTLOG   := $(CACHE)/test.log

# What starts real servers and is on no main path: other versions of them,
# packaging, browsers, faults for long, what judges the tests themselves.
WIDE := bench compose deploy etcd hostile mutation page release reliability template validity

# The packages that take longest come first, so that no processor waits for them
# at the end.
LONGEST := ./cmd/isthmus ./test/e2e ./test/simulation ./adapters/consul ./test/legacy ./server/supervisor ./adapters/nacos ./adapters/eureka \
	./plugin/plugintest ./adapters/etcd ./test/nacos ./adapters/zookeeper ./adapters/exec ./server ./test/python

# Without DWARF, which nobody reads, a test binary links in two thirds of the time.
.PHONY: test
test: ## the packages, and the main paths against one version of each real server
	@ISTHMUS_MAIN=1 $(GO) run ./internal/testenv/cmd/fetch
	@mkdir -p $(CACHE)
	@ISTHMUS_MAIN=1 $(GOTESTSUM) $(call again,test) --jsonfile-timing-events $(TESTLOG) \
		--packages "$(LONGEST) $$($(GO) list ./... | grep -vE '/test/($(subst $() ,|,$(WIDE)))(/|$$)' | paste -sd ' ' -)" \
		-- -vet=off -ldflags=-w -p $(TESTJOBS) -timeout 20m -skip '$(ALONE)'
	@if [ -n "$(TIMES)" ]; then \
		echo "the ten slowest packages, in seconds:"; \
		sed -n 's/.*"Action":"\(pass\|fail\)","Package":"\([^"]*\)","Elapsed":\([0-9.]*\)}.*/\3 \2/p' $(TESTLOG) | sort -rn | head -10; \
		echo "the ten slowest servers:"; ISTHMUS_MAIN=1 $(GO) run ./internal/testenv/cmd/fetch -times; fi

.PHONY: ci
ci: ## everything that CI runs
	@rm -rf $(UNSTEADY)
	@$(MAKE) test check race e2e fuzz compat; status=$$?; $(MAKE) -s unsteady; exit $$status

.PHONY: unsteady
unsteady: ## what the last make ci RERUN=1 had to run twice
	@grep -hs '2 runs, 1 failures' $(UNSTEADY)/* | sed '1i these failed once and passed when they ran again:'

# A program with the race detector waits a second when it ends, unless told
# otherwise; the tests start thousands of them.
# The package that takes longest comes first.
.PHONY: race
race: tools ## every test but the end-to-end ones, with the race detector
	GORACE=atexit_sleep_ms=10 $(GOTESTSUM) $(call again,race) --packages "./cmd/isthmus $(PKGS)" -- -race -vet=off -p $(JOBS) -timeout 40m -skip '$(ALONE)'

.PHONY: hostile
hostile: ## attacks on each port at full size, and all at once in 1 GiB; the table of docs/security.md
	$(GO) test -count=1 -timeout 30m -v -run TestHostile ./test/hostile -long 20s

# The tests of test/ that make test has skipped, most for a server that is on
# no main path; those of the other packages run in race.
SKIPPED = sed -n 's,.*"Action":"skip".*"Package":"\([^"]*/test/[^"]*\)"\,"Test":"\([^"/]*\).*,\1 \2,p' $(TESTLOG) | sort -u

.PHONY: e2e
e2e: tools | $(TESTLOG) ## the end-to-end tests that make test leaves out: other servers, packaging, compose on a Docker engine, charts, a browser
	$(GOTESTSUM) $(call again,wide) --packages "$(patsubst %,./test/%/...,$(WIDE))" -- -count=1 -p $(JOBS) -timeout 30m
	$(GOTESTSUM) $(call again,skipped) --packages "$$($(SKIPPED) | cut -d' ' -f1 | sort -u | paste -sd ' ' -)" -- \
		-count=1 -p $(JOBS) -timeout 30m -run "^($$($(SKIPPED) | cut -d' ' -f2 | sort -u | paste -sd '|' -))$$"
	$(GOTESTSUM) $(call again,alone) --packages "./cmd/isthmus ./adapters/nacos ./adapters/eureka ./adapters/etcd ./adapters/zookeeper ./server/xds" -- \
		-count=1 -p $(JOBS) -timeout 30m -run '$(ALONE)'

$(TESTLOG):
	$(MAKE) test

# The tests that ask for versions of servers, and the folders they are in.
MATRIX   = test(istiod|nacos)\.(TLS)?Versions\(\)|(Compat|DubboTool)\(\)
MATRIXED = $(shell grep -rlE --include='*_test.go' '$(MATRIX)' adapters internal server test)

.PHONY: compat
compat: tools ## the wide matrix: the versions of servers that make test leaves out
	ISTHMUS_COMPAT=1 $(GO) run ./internal/testenv/cmd/fetch
	ISTHMUS_COMPAT=1 $(GOTESTSUM) $(call again,compat) --packages "$(addprefix ./,$(sort $(patsubst %/,%,$(dir $(MATRIXED)))))" -- -count=1 -timeout 30m \
		-run "^($$(awk '/^func / { name = $$2; sub(/[^A-Za-z0-9_].*/, "", name) } name ~ /^Test/ && /$(MATRIX)/ { print name }' $(MATRIXED) | sort -u | paste -sd '|' -))\$$"

# The packages that read what peers send: requests, frames, tokens, rules,
# certificates, headers.
PEERS    := ./server/access ./server/xds ./server/mcp ./server

.PHONY: fuzz
fuzz: ## every fuzz target for FUZZTIME each, those of what peers send for PEERTIME
	./tools/fuzz $(PEERTIME) $(PEERS)
	./tools/fuzz $(FUZZTIME) $$($(GO) list ./... | grep -vxF "$$($(GO) list $(PEERS))")

.PHONY: fuzz-peers
fuzz-peers: ## what peers reach, for long, with the lowest priority: make fuzz-peers FUZZTIME=1h; the table of docs/security.md
	nice -n 19 ./tools/fuzz $(FUZZTIME) $(PEERS)

.PHONY: bench
bench: ## the benchmarks that docs/performance.md quotes
	$(GO) test -run '^$$' -bench . -benchmem $(PKGS)

.PHONY: bench-against
bench-against: ## the same beside those of another commit, in turns: make bench-against COMMIT=v0.1
	./tools/bench-against $(COMMIT)

.PHONY: bench-compare
bench-compare: build ## a change beside go-control-plane's caches, bare gRPC and Istio 1.8's own source, in turns: make bench-compare ARGS="--sinks 32"
	@peers=$$($(GO) run ./internal/testenv/cmd/fetch peers) && legacy=$$($(GO) run ./internal/testenv/cmd/fetch pilot-1.8-legacy) && \
	./bin/isthmus bench compare --peers "$$peers" --legacy "$$legacy" $(ARGS)

.PHONY: bench-registries
bench-registries: ## the scenarios consul and nacos with servers of their own, a quarter of an hour
	$(GO) test -run '^$$' -bench 'Consul|Nacos' -benchtime 1x -timeout 60m -v ./test/bench

.PHONY: bench-shards
bench-shards: ## what a change of one of 100,000 endpoints costs an istiod with 1 to 16 config sources
	$(GO) test -run '^$$' -bench IstiodShards -benchtime 20x -timeout 60m -v ./test/e2e

.PHONY: bench-restart
bench-restart: ## the time until 1,000,000 instances are served again, their registry down
	$(GO) test -run '^$$' -bench Restart -benchtime 3x -timeout 30m -v ./test/e2e

.PHONY: bench-consul
bench-consul: ## the table of adapters/consul/README.md, half an hour; then 10,000 changes, each compared with Consul's catalog
	$(GO) test -run '^$$' -bench ConsulLoad -benchtime 1x -timeout 90m ./adapters/consul
	$(GO) test -count=1 -run ConsulEveryChange -v -timeout 60m ./adapters/consul -long

.PHONY: bench-first-call
bench-first-call: ## the table of docs/install.md: from nothing that runs to the first call
	$(GO) test -run '^$$' -bench FirstCall -benchtime 3x -timeout 30m ./test/compose ./test/deploy

SEEDS ?= 1000
STATES ?= 3000
FIRST ?= 1

.PHONY: simulate
simulate: ## more seeds of the simulation: make simulate SEEDS=1000 FIRST=1
	$(GO) test -count=1 -run '^(TestSeeds|TestState)$$' -timeout 24h -v ./test/simulation -seeds $(SEEDS) -states $(STATES) -first $(FIRST)

OF ?= TestMutations|TestOwn

.PHONY: mutation
mutation: ## plant defects, look whether tests find them, write docs/mutations.md; OF=TestOwn: only those that the tests of a package find
	$(GO) test -count=1 -run '^($(OF))$$' -timeout 2h -v ./test/mutation -plant

ROUNDS ?= 100
WORLDS ?= 12
UNTIL  ?= 0
FLAPS  ?= 10m
FOR    ?= 2h
SIM    ?= {services: 10000, instances: 10, changes_per_second: 16}

.PHONY: chaos
chaos: tools ## every fault ROUNDS times together with the runs before, in WORLDS worlds side by side, each beside 100,000 endpoints, until UNTIL; writes docs/reliability.md
	$(GO) test -count=1 -run '^TestChaos$$' -timeout 48h -v ./test/reliability -faults . -rounds $(ROUNDS) -worlds $(WORLDS) -parallel $(WORLDS) -until $(UNTIL) \
		-frozen 30s -lasts 3s -flaps $(FLAPS) -write -sim '$(SIM)'

.PHONY: constant-work
constant-work: tools ## what an outage, a restart of 10,000 instances and a storm of 1,000 sinks cost; writes docs/reliability.md
	$(GO) test -count=1 -run '^TestConstantWork$$' -timeout 1h -v ./test/reliability -window 30s -write

.PHONY: soak
soak: tools ## FOR=2h of changes: sinks have what Consul has, memory, goroutines and files do not grow; writes docs/reliability.md
	$(GO) test -count=1 -run '^TestSoak$$' -timeout 48h -v ./test/reliability -for $(FOR) -write \
		-sim '$(SIM)'

.PHONY: tools
tools: $(LINT)/golangci-lint $(PROTO)/buf ## build or fetch every tool and test server into the user's cache directory
	$(GO) run ./internal/testenv/cmd/fetch

.PHONY: clean-tools
clean-tools: ## remove the servers and tools that tests run
	@du -sh $(CACHE) 2>/dev/null; rm -rf $(CACHE)

.PHONY: generate
generate: $(PROTO)/buf ## write all generated files again
	$(PROTO)/buf generate
	$(PROTO)/buf generate --template server/mcp/proto/buf.gen.yaml
	$(PROTO)/buf generate --template adapters/consul/proto/buf.gen.yaml
	$(GO) generate ./...

.PHONY: fmt
fmt: $(LINT)/golangci-lint ## format all Go files
	$(LINT)/gofumpt -w $(GOFILES)
	$(LINT)/gci write --skip-generated -s standard -s default -s 'prefix(github.com/isthmus-mesh/isthmus)' $(GOFILES)

.PHONY: format
format: $(LINT)/golangci-lint
	@unformatted=$$($(LINT)/gofumpt -l $(GOFILES) && \
		$(LINT)/gci list --skip-generated -s standard -s default -s 'prefix(github.com/isthmus-mesh/isthmus)' $(GOFILES)) || exit 1; \
	if [ -n "$$unformatted" ]; then echo "not formatted; run make fmt:"; echo "$$unformatted"; exit 1; fi

.PHONY: vet
vet:
	$(GO) vet ./...

.PHONY: lint
lint: $(LINT)/golangci-lint
	$(LINT)/golangci-lint run ./...
	$(LINT)/staticcheck ./...

# What only tests reach is dead too, but for the packages that are there for
# tests, those of third parties included.
FORTESTS := internal/test|plugin/plugintest/|server/servertest/

.PHONY: deadcode
deadcode: $(LINT)/golangci-lint
	@all=$$($(LINT)/deadcode ./...) && tested=$$($(LINT)/deadcode -test ./...) || exit 1; \
	dead=$$(printf '%s\n%s\n' "$$all" "$$tested" | sed -E '\,^($(FORTESTS)),d; /^$$/d'; echo "$$tested"); \
	if [ -n "$$dead" ]; then echo "$$dead" | sort -u; exit 1; fi

.PHONY: site
site: $(DOCS)/bin/mkdocs ## the documentation as a site, in dist/site; every link and anchor is checked
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --clean

.PHONY: release
release: pinned $(RELEASE)/goreleaser ## what a tag runs: programs, packages, image, SBOMs, signatures
	$(RELEASE)/goreleaser release --clean

.PHONY: pinned
pinned: ## nothing is released that is made of an image without a digest
	@! grep -HnE '^FROM [^@]+/[^@]+$$' Dockerfile deploy/release/Dockerfile || \
		{ echo "the images above have no digest: docker buildx imagetools inspect prints it; append it as @sha256:..., or merge Renovate's change" >&2; exit 1; }

.PHONY: release-check
release-check: $(RELEASE)/goreleaser ## the pipeline of a release: its file, and all that needs no registry
	$(RELEASE)/goreleaser check
	sbom=$$($(GO) run ./internal/testenv/cmd/fetch cyclonedx-gomod) && PATH="$$(dirname "$$sbom"):$$PATH" $(RELEASE)/goreleaser release --snapshot --clean --skip=docker,sign
	cd dist && sha256sum --check --quiet checksums.txt

# Its database is asked over the network. Where it cannot be had, that is said and
# decides nothing; a vulnerability that the product reaches (exit code 3) does.
.PHONY: vuln
vuln: $(VULN)/govulncheck ## known vulnerabilities that the program reaches
	@$(VULN)/govulncheck ./cmd/...; code=$$?; \
	if [ $$code -eq 3 ]; then exit 3; fi; \
	if [ $$code -ne 0 ]; then echo "govulncheck could not ask its database; nothing is known of vulnerabilities"; fi

.PHONY: tidy
tidy:
	$(GO) mod tidy -diff

.PHONY: proto
proto: $(PROTO)/buf
	$(PROTO)/buf lint
	@if git rev-parse --verify --quiet origin/main >/dev/null && git cat-file -e origin/main:buf.yaml 2>/dev/null; then \
		$(PROTO)/buf breaking --against '.git#ref=origin/main'; fi

.PHONY: generated
generated: $(PROTO)/buf
	@tmp=$$(mktemp -d) && trap 'rm -rf "$$tmp"' EXIT && \
	$(PROTO)/buf generate -o "$$tmp" && diff -r -x '*.proto' "$$tmp/plugin/proto" plugin/proto && \
	$(PROTO)/buf generate --template server/mcp/proto/buf.gen.yaml -o "$$tmp" && \
		diff -r -x '*.proto' -x buf.gen.yaml "$$tmp/server/mcp/proto" server/mcp/proto && \
	$(GO) run ./internal/pages -check && \
	$(PROTO)/buf generate --template adapters/consul/proto/buf.gen.yaml -o "$$tmp" && \
		diff -r -x '*.proto' -x buf.gen.yaml "$$tmp/adapters/consul/proto" adapters/consul/proto && \
	mkdir "$$tmp/reference" && $(GO) run ./cmd/isthmus docs --dir "$$tmp/reference" && for f in "$$tmp"/reference/*; do \
		diff "$$f" docs/reference/ || exit 1; done && \
	$(GO) run ./cmd/isthmus docs --schema > "$$tmp/schema.json" && diff "$$tmp/schema.json" docs/configuration.schema.json || \
	{ echo "generated files are not current; run make generate"; exit 1; }

# A tool directory comes into being in one step, so that an interrupted build leaves nothing half done.
define build_tools
	@echo "building $(1) tools; this happens once per version"
	@mkdir -p $(CACHE)/tools && tmp=$$(mktemp -d $(CACHE)/tools/.building-XXXXXX) && chmod 755 "$$tmp" && \
	(cd tools/$(1) && $(GO) build -trimpath -ldflags "-s -w" -o "$$tmp/" tool) && \
	rm -rf $(@D) && mv "$$tmp" $(@D)
endef

$(LINT)/golangci-lint:
	$(call build_tools,lint)

$(PROTO)/buf:
	$(call build_tools,proto)

$(VULN)/govulncheck:
	$(call build_tools,vuln)

$(RELEASE)/goreleaser:
	$(call build_tools,goreleaser)

$(DOCS)/bin/mkdocs:
	@echo "getting the generator of the site; this happens once per version"
	@rm -rf $(DOCS) && mkdir -p $(CACHE)/tools && python3 -m venv $(DOCS) && \
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check --require-hashes -r tools/docs/requirements.txt || { rm -rf $(DOCS); exit 1; }
