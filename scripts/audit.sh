#!/usr/bin/env bash
# Looks every locked package up in the Python Packaging Advisory Database, which has to be reachable.
# In an environment of its own: the auditor is no part of what it audits.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

AUDITOR=pip-audit==2.10.1
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT

.venv/bin/python -m venv "$FOLDER"
"$FOLDER/bin/python" -m pip install --quiet --disable-pip-version-check "$AUDITOR"
# The locks are whole and have hashes, so nothing is resolved or installed.
"$FOLDER/bin/pip-audit" --disable-pip --require-hashes --progress-spinner off \
    --requirement requirements/build.txt --requirement requirements/torch.txt \
    --requirement requirements/engines.txt --requirement requirements/cpu.txt \
    --requirement requirements/dev.txt
