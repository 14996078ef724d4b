# One file, no magic: `make` says what there is.
SHELL := /usr/bin/env bash -o pipefail -e
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory

# Tools come from hack/tools/go.mod, the control plane from hack/controlplane; both end in BIN.
BIN ?= $(CURDIR)/bin
IMG ?= fencedlease/manager:dev
KUBECTL ?= $(or $(shell command -v kubectl),$(BIN)/kubectl)
# More flags for `go test`, such as ARGS='-v -run Handover'.
ARGS ?=
FUZZTIME ?= 15s
MODULES := . hack/tools hack/controlplane/etcd hack/controlplane/kubernetes

##@ Start here

.PHONY: help
help: ## Show this help
	@awk 'BEGIN {FS = ":.*##"; printf "Usage: make TARGET\n"} \
		/^##@/ {printf "\n%s\n", substr($$0, 5)} \
		/^[a-z0-9-]+:.*##/ {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: controlplane ## Watch a paused holder come back and be refused (a minute; needs nothing but Go)
	@go run ./hack/demo

.PHONY: up
up: controlplane ## Start a local control plane with two managers in the background
	@go build -o $(BIN)/devctl ./hack/dev
	@$(BIN)/devctl up

.PHONY: down
down: ## Stop what `make up` started
	@go build -o $(BIN)/devctl ./hack/dev
	@$(BIN)/devctl down

##@ Test

.PHONY: test
test: controlplane ## Run all tests, the end-to-end stories included, with the race detector
	go build -race ./...
	go test -race -p 1 -count 1 -timeout 25m $(ARGS) ./...

.PHONY: test-e2e
test-e2e: controlplane ## Run only the end-to-end stories, on a real control plane with two managers
	go test -timeout 25m -count 1 $(ARGS) ./test/e2e/...

.PHONY: fuzz
fuzz: ## Fuzz each fuzz target for FUZZTIME
	@for package in $$(grep -rl --include='*_test.go' '^func Fuzz' . | xargs -r -n1 dirname | sort -u); do \
		for target in $$(go test -list '^Fuzz' $$package | grep '^Fuzz'); do \
			echo "fuzz $$package $$target"; \
			go test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) $$package; \
		done; \
	done

.PHONY: lint
lint: $(BIN)/golangci-lint ## Run the linters
	$(BIN)/golangci-lint run --allow-parallel-runners ./...

.PHONY: verify
verify: $(BIN)/controller-gen ## Fail if formatting, generated files or go.mod files are not up to date; changes nothing
	@hack/verify.sh

##@ Build

.PHONY: build
build: ## Build bin/manager
	CGO_ENABLED=0 go build -trimpath -o $(BIN)/manager .

.PHONY: controlplane
controlplane: ## Put etcd, kube-apiserver, kube-controller-manager and kubectl into bin/ (25 minutes, once per machine)
	@hack/controlplane/build.sh

.PHONY: generate
generate: $(BIN)/controller-gen ## Write the deep-copy functions
	$(BIN)/controller-gen object:headerFile=hack/boilerplate.go.txt paths=./api/...

.PHONY: manifests
manifests: $(BIN)/controller-gen ## Write the CRD
	$(BIN)/controller-gen crd paths=./api/... output:crd:dir=config/crd

.PHONY: fmt
fmt: ## Format the Go files
	gofmt -s -w .

.PHONY: tidy
tidy: ## Tidy the go.mod files of all modules
	@for module in $(MODULES); do (cd $$module && go mod tidy); done

.PHONY: clean
clean: down ## Remove bin/; the control plane stays in the user's cache
	rm -rf $(BIN)

##@ Install into the cluster of your kubeconfig

.PHONY: docker-build
docker-build: ## Build the image IMG
	docker build -t $(IMG) .

.PHONY: install
install: ## Install the CRD, the policies and the roles
	for part in namespace crd policy rbac; do $(KUBECTL) apply --server-side -k config/$$part; done

.PHONY: deploy
deploy: $(BIN)/kustomize ## Install everything, the manager with image IMG included
	@overlay=$$(mktemp -d $(CURDIR)/config/.deploy-XXXXXX); trap 'rm -rf "$$overlay"' EXIT; \
	cd $$overlay; $(BIN)/kustomize create --resources ../default; \
	$(BIN)/kustomize edit set image fencedlease/manager=$(IMG); \
	$(KUBECTL) apply --server-side -k .

# Tools, rebuilt when their versions change.

$(BIN)/controller-gen: TOOL = sigs.k8s.io/controller-tools/cmd/controller-gen
$(BIN)/golangci-lint: TOOL = github.com/golangci/golangci-lint/v2/cmd/golangci-lint
$(BIN)/kustomize: TOOL = sigs.k8s.io/kustomize/kustomize/v5
$(BIN)/controller-gen $(BIN)/golangci-lint $(BIN)/kustomize: hack/tools/go.mod hack/tools/go.sum
	cd hack/tools && CGO_ENABLED=0 go build -o $@ $(TOOL)
	@touch $@
