"""Clients of OpenAI's and Anthropic's APIs against a server: a plain answer, a stream, a tool, a typed answer.

    python tests/clients/run.py http://127.0.0.1:8000

prints a table; a dash is what a client has not. It runs in an environment of its own, without this package, against
``scripted.py`` (`make test-clients`). Each client is used as its own guide says.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version

os.environ |= {"OPENAI_API_KEY": "none", "OPENAI_AGENTS_DISABLE_TRACING": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
KINDS = ("plain", "stream", "tools", "typed")
WRONG = "-"


def main() -> int:
    """Run all clients, and print the table. Returns the number of cells that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="of the server, without /v1")
    parser.add_argument("--only", help="one client", default=None)
    args = parser.parse_args()
    sys.path.insert(0, os.path.dirname(__file__))
    cases = importlib.import_module("cases")
    failed, rows = 0, []
    for name, package in cases.CLIENTS.items():
        if args.only not in (None, name):
            continue
        row = [f"{name} {version(package)}"]
        for kind in KINDS:
            case: Callable[[str], None] | None = getattr(cases, f"{name.replace('-', '_')}_{kind}", None)
            if case is None:
                row.append(WRONG)
                continue
            try:
                result = case(args.url)
                if asyncio.iscoroutine(result):
                    asyncio.run(asyncio.wait_for(result, 120))
                row.append("right")
            except Exception as error:
                traceback.print_exc()
                row.append(f"{type(error).__name__}")
                failed += 1
        rows.append(row)
        print("| " + " | ".join(row) + " |", flush=True)
    print(f"\n| client | {' | '.join(KINDS)} |\n|{'---|' * 5}")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print(f"\n{failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 100))
