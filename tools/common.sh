# Shared by the scripts of this folder: paths, messages, and long steps with progress. Source it; do not run it.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
BUILD=$ROOT/build
VENV=$BUILD/venv
LOGS=$BUILD/logs
JOBS=${JOBS:-$(nproc)}
mkdir -p "$LOGS"

say() { printf '== %s\n' "$*"; }

die() {
  printf 'kvant: %s\n' "$*" >&2
  exit 1
}

# The newest site-packages folder of the virtual environment; empty before it exists.
site_packages() {
  local dirs=("$VENV"/lib/python3*/site-packages)
  [[ -d ${dirs[0]} ]] && printf '%s\n' "${dirs[0]}"
}

# long_step LABEL LOG COMMAND...: output goes to build/logs/LOG, a line is printed every 15 seconds, and a failure is
# one clear line, with the end of the log above it.
long_step() {
  local label=$1 log=$LOGS/$2 start=$SECONDS pid waited=0
  shift 2
  say "$label"
  "$@" >"$log" 2>&1 </dev/null &
  pid=$!
  while kill -0 "$pid" 2>/dev/null; do
    sleep 1
    waited=$((waited + 1))
    if ((waited % 15 == 0)); then
      printf '   %s: %d s, %s\n' "$label" "$((SECONDS - start))" "$(tail -n 1 "$log" | tr -d '\r' | cut -c -90)"
    fi
  done
  if ! wait "$pid"; then
    tail -n 15 "$log" >&2
    die "failed: $label (the whole log is in ${log#"$ROOT"/})"
  fi
  printf '   done in %d s\n' "$((SECONDS - start))"
}
