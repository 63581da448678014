#!/usr/bin/env bash
# Makes the Python environment of the tree: scripts/environment.sh <folder> <torch version>
# Does nothing when the folder already holds what requirements-dev.txt and the torch version ask for.
set -euo pipefail
cd "$(dirname "$0")/.."

venv="$1"
torch="$2"
python="${PYTHON:-python3}"
stamp="$venv/.requirements"
wanted="torch==$torch
$(cat requirements-dev.txt)"

if [[ -x "$venv/bin/python" && -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
  exit 0
fi
if [[ ! -x "$venv/bin/python" ]]; then
  echo "==> making the Python environment $venv ($("$python" --version))"
  "$python" -m venv "$venv"
fi
echo "==> installing torch $torch and the build and test tools into $venv (a download of some 2 GB the first time)"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "torch==$torch" -r requirements-dev.txt
printf '%s\n' "$wanted" > "$stamp"
