#!/usr/bin/env bash
# Says whether formatting, generated files and go.mod files are what the sources say. It works on a copy of the
# checkout, so it changes nothing here, and work that is not committed yet is judged as it stands.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT

# What git does not know, a fresh clone does not have.
forgotten=$(git ls-files --others --exclude-standard -- '*zz_generated*' 'config/crd/fencedlease.dev_*.yaml' '*go.sum' '*go.mod')
if [ -n "$forgotten" ]; then
	printf 'verify: not in git, and a fresh clone needs it; git add:\n%s\n' "$forgotten" >&2
	exit 1
fi

git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
	[ -e "$file" ] && printf '%s\0' "$file"
done | tar -c --null -T - | tar -x -C "$copy"
cd "$copy"
git -c init.defaultBranch=main init -q .
git add -A -f .
make BIN="$root/bin" generate manifests fmt tidy
git add -A -N . # so that new files show in the diff
if ! git --no-pager diff --exit-code; then
	echo "verify: the files above are out of date: run make generate manifests fmt tidy, and commit the result" >&2
	exit 1
fi
echo "verify: formatting, generated files and go.mod files are up to date"
