#!/usr/bin/env bash
# Makes sure that there is a Chromium for the tests of the demo: the system's, else apt's or Playwright's own.
# Without one the tests are skipped and say so: this never fails.
# usage: tools/browser.sh PYTHON     (a Python that has the `playwright` package)
set -uo pipefail
python=$1
cd "$(dirname "$0")/.."

there() { PYTHONPATH=tests/demo "$python" -c 'import sys, browsers; sys.exit(browsers.find() is None)'; }

there && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    echo "installing Chromium with apt-get"
    apt-get install -y -qq --no-install-recommends chromium > /dev/null 2>&1 ||
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium > /dev/null; }
else
    echo "downloading Chromium with Playwright"
    "$python" -m playwright install chromium-headless-shell chromium
fi
there || echo "no Chromium could be had: the tests of the demo will be skipped (apt-get install chromium)" >&2
