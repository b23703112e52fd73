"""``python -m demo``: serve the page."""

from __future__ import annotations

import argparse
import ipaddress
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Options of the command line; see :func:`arguments`.

    The first of ``models`` is chosen at first. Without any it is ``small``, or ``probe`` while that is not here.
    """

    models: Sequence[str] | None = None
    device: str = "auto"
    threads: int | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    browser: bool = False
    share: bool = False

    @property
    def is_open(self) -> bool:
        """Other machines than this one can reach the page."""
        try:
            here = ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name
            here = self.host == "localhost"
        return self.share or not here


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="demo", description="Watch the time per token of sparse and full attention.")
    parser.add_argument(
        "--model",
        dest="models",
        action="append",
        metavar="MODEL",
        help="offered beside probe and small: a hub id or a path; may be repeated. The first is chosen at first; "
        "default small, or probe while that is not here (`hf-sparsekv fetch` brings it)",
    )
    parser.add_argument("--device", default=Options.device, help="auto, cpu, cuda, cuda:1")
    parser.add_argument("--threads", type=int, help="of torch on a CPU; default: all but one, which serves the page")
    parser.add_argument(
        "--host",
        default=Options.host,
        help="0.0.0.0 lets other machines in, which may then choose probe, small and what --model names, and no other "
        "hub id or path; default %(default)s",
    )
    parser.add_argument("--port", type=int, help="default: the first free one from 7860 on")
    parser.add_argument("--browser", action="store_true", help="open a browser")
    parser.add_argument(
        "--share", action="store_true", help="a public link through gradio's servers; models as with --host"
    )
    return parser


def serve(options: Options) -> int:
    """Say where the page is, and serve until interrupted; 1 if that is not possible, and why on standard error."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from . import app
    except ImportError as error:
        print(f"the demo needs gradio and pypdf ({error}): pip install '.[demo]'", file=sys.stderr)
        return 1
    import torch

    from .models import PROBE, SMALL, ModelError, Models, locate, pick_device

    torch.set_num_threads(options.threads or max(1, (os.cpu_count() or 2) - 1))
    warnings.filterwarnings("ignore", message="decode steps run eagerly")
    first, *more = options.models or (SMALL,)
    try:
        if not options.models:
            try:
                locate(SMALL)
            except ModelError as error:
                print(f"{error}; until then the page begins with probe")
                first = PROBE
        models = Models(pick_device(options.device), listed=(PROBE, SMALL, first, *more) if options.is_open else None)
        for name in (first, *more):
            models.look(name)
        page, url = app.launch(
            models, first, options.host, options.port, options.browser, options.share, block=False, more=more
        )
    except (ModelError, OSError, RuntimeError) as error:  # no such model, device or port
        print(error, file=sys.stderr)
        return 1
    if models.listed is not None:
        print(f"others can reach the page and choose {', '.join(models.listed)}; no other models")
    print(f"{url}  (Ctrl-C ends it)", flush=True)
    page.block_thread()
    return 0


def main() -> int:
    return serve(Options(**vars(arguments().parse_args())))


if __name__ == "__main__":
    raise SystemExit(main())
