"""``python -m demo``: serve the page."""

from __future__ import annotations

import argparse
import os
import warnings


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="demo", description="Watch the time per token of sparse and full attention.")
    parser.add_argument("--model", default="probe", help="chosen at first: probe, small, a hub id or a path")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    parser.add_argument("--threads", type=int, help="of torch on a CPU; default: all but one, which serves the page")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets other machines in")
    parser.add_argument("--port", type=int, help="default: the first free one from 7860 on")
    parser.add_argument("--browser", action="store_true", help="open a browser")
    parser.add_argument("--share", action="store_true", help="a public link through gradio's servers")
    return parser


def serve(args: argparse.Namespace) -> int:
    """Load, say where the page is, and serve until interrupted."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from . import app
    except ImportError as error:
        print(f"the demo needs gradio and pypdf ({error}): pip install 'hf-sparsekv[demo]'")
        return 1
    import torch

    from .models import ModelError, Models

    device = app.pick_device(args.device)
    torch.set_num_threads(args.threads or max(1, (os.cpu_count() or 2) - 1))
    warnings.filterwarnings("ignore", message="decode steps run eagerly")
    models = Models(device)
    try:
        models.look(args.model)
    except ModelError as error:
        print(error)
        return 1
    page, url = app.launch(models, args.model, args.host, args.port, args.browser, args.share, block=False)
    print(f"{url}  (Ctrl-C ends it)", flush=True)
    page.block_thread()
    return 0


def main() -> int:
    return serve(arguments().parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
