#!/bin/bash
# Builds every fuzz target with OSS-Fuzz's compile_native_go_fuzzer, as
# PACKAGE_TARGET, so that equal names of two packages differ.
set -euo pipefail
module=$(sed -n 's/^module //p' go.mod)
git grep -E '^func Fuzz[A-Za-z0-9_]*\(f \*testing\.F\)' -- '*_test.go' | while IFS=: read -r file line; do
  package=$(dirname "$file")
  target=$(sed -E 's/^func (Fuzz[A-Za-z0-9_]*).*/\1/' <<<"$line")
  compile_native_go_fuzzer "$module/$package" "$target" "$(tr / _ <<<"$package")_$target"
done
