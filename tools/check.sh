#!/usr/bin/env bash
# make check: format, layering, public headers, clang-tidy. `tools/check.sh quick` leaves clang-tidy out.
source "$(dirname "$0")/common.sh"

cd "$ROOT"
mapfile -t sources < <(git ls-files --cached --others --exclude-standard '*.cpp' '*.hpp' '*.h' '*.cu' '*.cuh')
for tool in clang-format clang-tidy; do
  command -v "$tool" >/dev/null || die "$tool was not found (tools/setup.sh packages installs it)"
done

say "format of ${#sources[@]} files"
clang-format --dry-run --Werror "${sources[@]}" || die "format: run clang-format -i on the files above"

say "layers"
python3 tools/check_layers.py

say "public headers alone, with g++ and clang++"
tools/check_headers.sh

[[ ${1:-} == quick ]] && exit 0

say "clang-tidy"
database=$BUILD/release/compile_commands.json
[[ -s $database ]] || "$ROOT/tools/build.sh" release
mapfile -t compiled < <(python3 tools/compiled_files.py "$database")
printf '%s\n' "${compiled[@]}" | xargs -P "$JOBS" -n 1 clang-tidy --quiet -p "$BUILD/release" 2>"$LOGS/tidy.log" ||
  die "clang-tidy: see above"
printf '   %d files are clean\n' "${#compiled[@]}"
