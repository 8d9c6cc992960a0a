#!/usr/bin/env bash
# Makes .venv with everything that Gyre needs on a machine without a GPU, Debian packages included.
# With --tests also what only the tests need of the system.
# A finished set-up leaves a stamp with the hash of what it was made from, so the next one returns
# at once; a broken-off one goes on where it stopped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

FOR=${1:-}
VENV=.venv
STAMP=$VENV/.gyre-setup
INPUTS=(requirements/build.txt requirements/cpu.txt requirements/torch.txt
        requirements/torch-cpu.txt requirements/engines.txt requirements/dev.txt
        pyproject.toml scripts/setup.sh)

say() { printf '[set-up %3ds] %s\n' "$SECONDS" "$*"; }
fail() {
    printf 'set-up failed: %s\n' "$*" >&2
    exit 1
}
wanted() { { printf '%s\n' "$PWD"; cat "${INPUTS[@]}"; } | sha256sum | cut -d' ' -f1; }
done_before() {
    [[ -x $VENV/bin/python && -f $STAMP && $(<"$STAMP") == "$(wanted)" ]] && system_ready
}

# --- Debian packages: looked for by what they provide, so that other systems pass too ---

has_library() { PATH=$PATH:/usr/sbin:/sbin ldconfig -p | grep -q "^[[:space:]]*$1 "; }
missing_packages() {
    command -v bwrap >/dev/null || echo bubblewrap     # the sandbox of the agents
    has_library libibverbs.so.1 || echo libibverbs1    # these three are linked by Mooncake
    has_library libnuma.so.1 || echo libnuma1
    has_library libcurl.so.4 || echo libcurl4
    [[ $FOR == --tests ]] || return 0
    command -v npm >/dev/null || echo npm              # the clients that tests run come from there
    command -v chromium >/dev/null || echo chromium    # tests press buttons in Prefect's pages
    command -v redis-server >/dev/null || echo redis-server    # its server is run on these two
    compgen -G "/usr/lib/postgresql/*/bin/postgres" >/dev/null || echo postgresql
}
system_ready() { [[ -z $(missing_packages) ]]; }

install_debian() {
    command -v apt-get >/dev/null ||
        fail "this machine lacks $* and has no apt-get. Install what your system calls them, then run this again."
    local as_root=()
    if [[ $(id -u) != 0 ]]; then
        command -v sudo >/dev/null ||
            fail "this machine lacks $*. As root, run: apt-get install $*"
        as_root=(sudo)
    fi
    say "installing Debian packages: $*"
    "${as_root[@]}" apt-get -q -o DPkg::Lock::Timeout=120 update >"$LOG" 2>&1 || show_log_and_fail "apt-get update"
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=120 \
        install --no-install-recommends "$@" >"$LOG" 2>&1 || show_log_and_fail "apt-get install $*"
}

show_log_and_fail() {
    tail -n 30 "$LOG" >&2
    fail "$1 ended with an error (above)"
}

# --- Python ---

fits() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' \
        2>/dev/null
}

fitting_python() {
    local name
    for name in ${PYTHON:-python3.11 python3.12 python3}; do
        if fits "$name"; then
            echo "$name"
            return
        fi
    done
    return 1
}

count_locked() { cat requirements/cpu.txt requirements/dev.txt | grep -c '^[^# ]'; }

# Without byte code: Python writes that of the few modules it imports, which is sooner than pip
# compiling all of them.
pip_install() {
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-input \
        --no-compile --progress-bar off --retries 5 "$@"
}

# Only files whose hashes are in the locks.
pip_locked() { pip_install --require-hashes --no-deps "$@"; }

step() {
    local title=$1 start=$SECONDS
    shift
    say "installing $title"
    "$@" >"$LOG" 2>&1 || show_log_and_fail "installing $title"
    say "  took $((SECONDS - start)) s"
}

# pip prefers a file whose hash its index tells, so the small build has to be asked for by name.
install_torch() {
    pip_locked -r requirements/torch-cpu.txt || pip_locked -r requirements/torch.txt
}

# Downloads of the large wheels and the many small ones overlap; they share no package.
install_packages() {
    local large status=0
    { install_torch && pip_locked -r requirements/engines.txt; } &
    large=$!
    pip_locked -r requirements/cpu.txt -r requirements/dev.txt || status=$?
    wait "$large" || status=$?
    return "$status"
}

# A CPU build is complete. A CUDA build names the versions of the NVIDIA libraries that it links.
complete_torch() {
    local build
    build=$("$VENV/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')
    [[ $build == *+cpu ]] || pip_install "torch==$build"
}

check_environment() {
    "$VENV/bin/python" - <<'PY'
import importlib.metadata
import sys

import mooncake.engine  # noqa: F401  (links the Debian libraries)
import torch

names = ("prefect", "sglang", "megatron-core", "mooncake-transfer-engine-non-cuda", "renderers")
versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
print(f"python {sys.version.split()[0]}, torch {torch.__version__}, {versions}")
PY
}

main() {
    [[ $FOR == "" || $FOR == --tests ]] || fail "unknown argument $FOR; there is --tests"
    [[ $(uname -s) == Linux ]] || fail "Gyre runs on Linux (namespaces and process groups), this is $(uname -s)"
    done_before && return
    exec 9<scripts/setup.sh
    flock 9
    done_before && return # another set-up finished while this one waited
    LOG=$(mktemp)
    trap 'rm -f "$LOG"' EXIT

    local packages
    mapfile -t packages < <(missing_packages)
    ((${#packages[@]} == 0)) || install_debian "${packages[@]}"
    if ! fitting_python >/dev/null && command -v apt-get >/dev/null; then
        install_debian python3 python3-venv
    fi
    local python
    python=$(fitting_python) ||
        fail "no Python 3.11 or 3.12 with venv was found. Install one, or name it: PYTHON=/path/to/python3.11 make ..."

    say "environment in $VENV with $("$python" --version)"
    fits "$VENV/bin/python" || "$python" -m venv --clear "$VENV"
    step "pip and setuptools" pip_locked -r requirements/build.txt
    step "torch, sglang, mooncake and $(count_locked) locked packages" install_packages
    step "what this build of torch needs besides" complete_torch
    step "gyre itself" pip_install --no-deps --no-build-isolation -e .
    # Its byte code is written now: the sandbox, in which hidden tests run it, could not keep it.
    "$VENV/bin/python" -m pytest --version >"$LOG" 2>&1 || show_log_and_fail "pytest --version"
    say "$(check_environment)"
    wanted >"$STAMP"
    say "done"
}

main "$@"
