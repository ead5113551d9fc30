#!/usr/bin/env bash
# Measures step time and device memory on the attached NVIDIA GPU, unattended, in less than 9 minutes.
#
#   bash benchmarks/gpu.sh [--minutes 9] [--groups gpt_scan resnet50 ...] [--out DIR] [--dry-run]
#
# Takes the first python that has jax (0.10 or newer), flax, optax and what remat needs, and sees a GPU;
# without one, makes a virtual environment in build/gpu-venv and installs `.[gpu,bench]`, which needs the
# network. The results are written row by row to benchmarks/results/gpu_<device>_<date>.json.
#
#   PYTHON=/path/to/python   the interpreter to try first
set -uo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/build/gpu-venv"
MINUTES=9
DRY_RUN=no
REST=()
while [ $# -gt 0 ]; do
  case "$1" in
    --minutes) MINUTES="${2:?--minutes needs a number}"; shift 2 ;;
    --dry-run) DRY_RUN=yes; REST+=("$1"); shift ;;
    -h | --help) sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) REST+=("$1"); shift ;;
  esac
done
TOTAL="$(awk -v m="$MINUTES" 'BEGIN { printf "%d", 60 * m }')"
if [ "$TOTAL" -lt 30 ]; then
  echo "--minutes $MINUTES is too short: expected at least 0.5" >&2
  exit 2
fi

# The deadline: `timeout` ends whatever still runs 15 s before the time is over, and kills it 5 s later.
left() { echo $((TOTAL - 20 - SECONDS)); }
within() {
  local seconds
  seconds="$(left)"
  [ "$seconds" -gt 0 ] || return 124
  timeout --kill-after=5 "$seconds" "$@"
}

export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
export XLA_PYTHON_CLIENT_PREALLOCATE=false
[ "$DRY_RUN" = yes ] && export JAX_PLATFORMS=cpu

# Whether a python has everything; the check of the device is last, because it is slow.
CHECK='
import importlib.util as util, sys
names = ("jax", "jaxlib", "flax", "optax", "highspy", "networkx", "numpy", "rich", "scipy")
missing = [name for name in names if util.find_spec(name) is None]
if sys.version_info < (3, 11) or missing:
    sys.exit(f"python {sys.version.split()[0]}, missing: {missing}")
import jax
if tuple(int(part) for part in jax.__version__.split(".")[:2]) < (0, 10):
    sys.exit(f"jax {jax.__version__} is older than 0.10")
if sys.argv[1] == "no" and jax.devices()[0].platform not in ("gpu", "cuda"):
    sys.exit(f"jax {jax.__version__} sees no GPU")
'
usable() {
  local answer
  answer="$(within "$1" -c "$CHECK" "$DRY_RUN" 2>&1)" && return 0
  echo "  $1: $(echo "$answer" | tail -n 1)" >&2
  return 1
}

FOUND=""
CANDIDATES=("$VENV/bin/python" "$ROOT/.venv/bin/python" python3 python3.12 python3.11 python)
for candidate in ${PYTHON:+"$PYTHON"} "${CANDIDATES[@]}"; do
  command -v "$candidate" > /dev/null 2>&1 || continue
  if usable "$candidate"; then
    FOUND="$candidate"
    break
  fi
done

if [ -z "$FOUND" ]; then
  echo "no python here has jax with a GPU: installing one in $VENV" >&2
  for base in ${PYTHON:+"$PYTHON"} python3.12 python3.11 python3; do
    command -v "$base" > /dev/null 2>&1 || continue
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || continue
    within "$base" -m venv --clear "$VENV" &&
      within "$VENV/bin/python" -m pip install --quiet "$ROOT[gpu,bench]" &&
      usable "$VENV/bin/python" && FOUND="$VENV/bin/python"
    break
  done
fi
if [ -z "$FOUND" ]; then
  echo "nothing was measured: there is no python with jax and a GPU, and none could be installed" >&2
  exit 2
fi

echo "measuring with $("$FOUND" --version), $FOUND"
cd "$ROOT" || exit 2
REMAINING="$(awk -v s="$(left)" 'BEGIN { printf "%.2f", s / 60 }')"
within "$FOUND" -u -m benchmarks.gpu --minutes "$REMAINING" ${REST[@]+"${REST[@]}"}
