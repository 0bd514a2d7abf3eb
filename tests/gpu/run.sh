#!/bin/sh
# What can be said of stagetrace on a GPU only, measured on one: at most 8 minutes on one H200-class card.
#
#   tests/gpu/run.sh [OUT.json]        PYTHON: an interpreter that has PyTorch with CUDA (default: python3)
#                                      WHEELS: a folder with wheels of what it lacks of tests/gpu/requirements.txt,
#                                              put beside its own for this run (default: tests/gpu/wheels)
#
# Parts whose packages are not there are left out, and the JSON says so; PyTorch alone is enough for most.
# Exit code: 0 all that ran holds, 1 something does not, 2 bad arguments, 3 nothing could be run on a GPU.
set -eu
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
WHEELS=${WHEELS:-tests/gpu/wheels}
command -v "$PYTHON" >/dev/null || { echo "run.sh: no $PYTHON found: name an interpreter: PYTHON=... tests/gpu/run.sh" >&2; exit 2; }
if [ -d "$WHEELS" ]; then
    # Into a folder of their own: nothing of the machine's is replaced.
    SITE=$(mktemp -d)
    trap 'rm -rf "$SITE"' EXIT
    "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$SITE" "$WHEELS"/*.whl \
        || echo "run.sh: not all of $WHEELS could be installed" >&2
    PYTHONPATH="$SITE${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$PWD:$PWD/src:$PWD/integrations:$PWD/exporters${PYTHONPATH:+:$PYTHONPATH}"
"$PYTHON" -m tests.gpu --out "${1:-gpu.json}"
