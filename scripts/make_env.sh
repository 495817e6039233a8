#!/usr/bin/env bash
# Make the virtual environment .venv with the pinned versions; do nothing when it is up to date.
# FFCV and fairseq are compiled here. If the packages for that are missing and cannot be installed, everything works
# except data.loader=ffcv and the transformer.
# Usage: scripts/make_env.sh        (called by `make env`; set PYTHON to choose the interpreter)
set -euo pipefail
cd "$(dirname "$0")/.."

ffcv_packages="build-essential pkg-config libopencv-dev libturbojpeg0-dev"
hosts_packages="iproute2 iptables"  # for scripts/emulate, which only root can use
browser_packages="chromium"  # for the tests of the page of scripts/report.py
stamp=.venv/.installed

can_compile_ffcv() {
  command -v c++ > /dev/null && command -v pkg-config > /dev/null &&
    { pkg-config --exists opencv4 || pkg-config --exists opencv; } && pkg-config --exists libturbojpeg
}

# Changes with the pinned versions, and when what FFCV needs has been installed.
fingerprint() {
  cat pyproject.toml constraints.txt scripts/make_env.sh | sha256sum | cut -d' ' -f1
  can_compile_ffcv && echo "with FFCV" || echo "without FFCV"
}

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint)" ] && .venv/bin/python -c "" 2>/dev/null; then
  exit 0
fi

python=${PYTHON:-}
if [ -z "$python" ]; then
  for candidate in python3 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      python=$candidate
      break
    fi
  done
fi
if [ -z "$python" ]; then
  echo "error: no Python >= 3.11 found. Install one (Debian/Ubuntu: apt-get install python3 python3-venv) or set PYTHON." >&2
  exit 2
fi

as_root=""
[ "$(id -u)" = 0 ] || as_root="sudo"

# Debian and Ubuntu package ensurepip separately from Python.
if ! "$python" -c "import ensurepip, venv" 2>/dev/null; then
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  package="python$version-venv"
  echo "installing $package ..."
  if ! { $as_root apt-get update -qq && $as_root apt-get install -y -qq "$package"; }; then
    echo "error: Python's venv module is missing. Install $package, then call this again." >&2
    exit 2
  fi
fi

echo "making .venv with $("$python" --version) (a minute or two the first time) ..."
[ -x .venv/bin/python ] && .venv/bin/python -c "import pip" 2>/dev/null || "$python" -m venv --clear .venv
pip=".venv/bin/python -m pip --disable-pip-version-check"

# uv takes less than half of pip's time. It does not read pip's settings: those about package sources are passed on.
pass_on() {  # UV_VARIABLE pip-setting separator-of-several-values
  value=$($pip config list | sed -n "s/^[^=]*\.$2='\(.*\)'$/\1/p" | sed "s/ /$3/g; s/\\\\n/$3/g" | head -n 1)
  [ -z "$value" ] || export "$1=${!1:-$value}"
}
uv=""
if $pip install --quiet --constraint constraints.txt uv; then
  uv=".venv/bin/python -m uv pip install --quiet --compile-bytecode --python .venv/bin/python"
  pass_on UV_FIND_LINKS find-links ,
  pass_on UV_DEFAULT_INDEX index-url " "
  pass_on UV_INDEX extra-index-url " "
  export UV_INDEX_STRATEGY=unsafe-best-match  # as pip does: the best version that any source has
fi
install() { { [ -n "$uv" ] && $uv "$@"; } || $pip install --quiet "$@"; }

install --constraint constraints.txt --editable ".[dev]"

install_packages() {
  echo "installing $* ..."
  {
    $as_root apt-get update -qq &&
      $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
  } > /dev/null || true
}

# Only where no password is needed.
if command -v apt-get > /dev/null && { [ -z "$as_root" ] || sudo -n true 2>/dev/null; }; then
  can_compile_ffcv || install_packages $ffcv_packages
  [ -n "$as_root" ] || { command -v tc && command -v iptables; } > /dev/null || install_packages $hosts_packages
  command -v chromium > /dev/null || install_packages $browser_packages
fi
without_ffcv="FFCV is not installed; data.loader=torchvision works without it."
if ! can_compile_ffcv; then
  echo "note: $without_ffcv To have it: apt-get install $ffcv_packages, then call this again." >&2
elif ! { install --constraint constraints.txt --editable ".[dev,ffcv]" && install --no-deps ffcv==1.0.2; }; then
  echo "note: $without_ffcv It could not be compiled; the reason is above." >&2
fi
# fairseq reads and writes the transformer's data; it is compiled too.
if ! command -v c++ > /dev/null ||
  ! { install --constraint constraints.txt --editable ".[dev,fairseq]" && install --no-deps fairseq==0.12.2; }; then
  echo "note: fairseq is not installed (it needs a C++ compiler); everything but the transformer works without it." >&2
fi
fingerprint > "$stamp"
