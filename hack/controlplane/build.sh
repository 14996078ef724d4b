#!/usr/bin/env bash
# Puts etcd, kube-apiserver, kube-controller-manager and kubectl into bin/.
#
# Each is taken from KUBEBUILDER_ASSETS where it lies there, else from the user's cache, else it is built
# from its Go module into that cache: once per machine, version and platform (25 minutes on two cores).
# Every step is safe to repeat: a binary appears in the cache complete, under its name, or not at all.
set -euo pipefail
cd "$(dirname "$0")"

# The one place that names the versions is each module's go.mod.
version() { (cd "$1" && go list -m -f '{{.Version}}' "$2"); }
fail() { printf 'controlplane: %s\n' "$*" >&2; exit 1; }
command -v go >/dev/null || fail "go is not on the PATH: install Go 1.26 or newer"

export CGO_ENABLED=0 GOFLAGS=-buildvcs=false
bin=$(cd ../.. && pwd)/bin
kubernetes=$(version kubernetes k8s.io/kubernetes) || fail "cannot read the module k8s.io/kubernetes: is the Go module proxy reachable?"
etcd=$(version etcd go.etcd.io/etcd/server/v3) || fail "cannot read the module etcd: is the Go module proxy reachable?"
cache=${XDG_CACHE_HOME:-$HOME/.cache}/fencedlease/controlplane/$(go env GOOS)-$(go env GOARCH)-kubernetes-$kubernetes-etcd-$etcd
mkdir -p "$bin" "$cache"

# What a release of Kubernetes would carry: the version that clients and the compatibility machinery read.
IFS=. read -r major minor _ <<<"${kubernetes#v}"
ldflags="-s -w"
for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
	ldflags+=" -X $package.gitVersion=$kubernetes -X $package.gitMajor=$major -X $package.gitMinor=$minor"
	ldflags+=" -X $package.gitTreeState=clean"
done

# progress NAME TOTAL: turns the package names that go build -v prints into one line now and then.
progress() {
	awk -v name="$1" -v total="$2" '
		/^[^ ]+\/[^ ]+$/ || /^[a-z0-9]+$/ { if (++n % 100 == 0) { printf "controlplane: %s: compiled %d packages (of at most %d)\n", name, n, total; fflush() } ; next }
		{ print; fflush() }'
}

# build NAME MODULE PACKAGE
build() {
	local name=$1 module=$2 package=$3 total free
	free=$(df -Pk "$cache" | awk 'NR==2 {print int($4/1024)}')
	[ "$free" -ge 6000 ] || fail "building $name needs 6000 MB in $cache and the Go build cache, and $free MB are free: make room, or point XDG_CACHE_HOME and GOCACHE elsewhere"
	echo "controlplane: building $name (once per machine; cached in $cache)"
	(cd "$module" && go mod download) || fail "cannot download the modules of $name: is the Go module proxy reachable?"
	total=$(cd "$module" && go list -deps "$package" | wc -l)
	(cd "$module" && go build -v -trimpath -ldflags "$ldflags" -o "$cache/.$name.tmp" "$package") 2>&1 | progress "$name" "$total" ||
		fail "building $name failed; the compiler's words are above. Disk free: $(df -Ph "$cache" | awk 'NR==2 {print $4}')"
	mv "$cache/.$name.tmp" "$cache/$name"
	echo "controlplane: built $name"
}

# provide NAME MODULE PACKAGE
provide() {
	local name=$1 from=$cache/$1
	if [ -n "${KUBEBUILDER_ASSETS:-}" ] && [ -x "$KUBEBUILDER_ASSETS/$name" ]; then
		from=$(cd "$KUBEBUILDER_ASSETS" && pwd)/$name
	elif [ ! -x "$from" ]; then
		build "$@"
	fi
	[ "$from" = "$bin/$name" ] || ln -sfn "$from" "$bin/$name"
}

# Two clones on one machine must not compile the same thing side by side.
exec 9>"$cache/.lock"
if ! flock -n 9; then
	echo "controlplane: another build is under way on this machine; waiting for it"
	flock 9
fi
provide etcd etcd go.etcd.io/etcd/server/v3
provide kube-apiserver kubernetes k8s.io/kubernetes/cmd/kube-apiserver
provide kubectl kubernetes k8s.io/kubernetes/cmd/kubectl
provide kube-controller-manager kubernetes k8s.io/kubernetes/cmd/kube-controller-manager
