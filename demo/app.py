"""The page: controls on the left, the race on the right."""

from __future__ import annotations

import os

# Before gradio is imported: nothing may leave the machine unasked.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from collections.abc import Sequence
from importlib import resources

import gradio as gr

from . import documents
from .caches import DENSE, METHODS
from .desk import Desk
from .models import PROBE, SMALL, Models

NO_FONTS = ["ui-sans-serif", "system-ui", "sans-serif"]  # of the system: others would be fetched
MONO = ["ui-monospace", "monospace"]
LABELS = {PROBE: "probe (6M, own language)", SMALL: "small (SmolLM2-135M)"}  # of the models that are always offered
SOURCES = ["Bundled", "Paste", "Upload"]
# On a phone the results lie far below the button.
_SHOW = "() => { document.getElementById('status').scrollIntoView({ block: 'nearest', behavior: 'smooth' }); }"
INTRO = (
    "One document, read once. Two caches answer the same question about it: full attention, and one that reads only "
    "what it chooses. They take turns, so each clock counts its own steps and nothing else."
)


def theme() -> gr.themes.Base:
    """Quiet, and without fonts from elsewhere."""
    return gr.themes.Base(
        primary_hue="teal", neutral_hue="gray", text_size="sm", radius_size="sm", font=NO_FONTS, font_mono=MONO
    ).set(body_background_fill="#f8f9fa", block_border_width="1px", block_shadow="none")


def css() -> str:
    return resources.files("demo").joinpath("page.css").read_text(encoding="utf-8")


def build(models: Models, model: str = PROBE, more: Sequence[str] = ()) -> gr.Blocks:
    """The page.

    Args:
        model: chosen at first.
        more: names of models that are offered beside it and those of ``LABELS``.
    """
    desk = Desk(models)
    listed = models.listed is not None
    offered = [(LABELS.get(name, name), name) for name in dict.fromkeys([*LABELS, model, *more])]
    on_gpu = models.device.type == "cuda"
    with gr.Blocks(title="hf-sparsekv: time per token", analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        gr.HTML(f"<h1>Sparse KV caches: watch the time per token</h1><p class='intro'>{INTRO}</p>")
        with gr.Row(equal_height=False):
            with gr.Column(scale=2, min_width=300):
                chosen = gr.Dropdown(
                    offered,
                    value=model,
                    label="Model",
                    info="others can reach this page: only these" if listed else "or a hub id, or a path",
                    allow_custom_value=not listed,
                    elem_id="model",
                )
                with gr.Group():
                    source = gr.Radio(SOURCES, value=SOURCES[0], label="Document", elem_id="source")
                    pasted = gr.Textbox(
                        label="Text",
                        lines=4,
                        max_lines=8,
                        visible=False,
                        elem_id="pasted",
                        max_length=documents.MAX_CHARACTERS,
                    )
                    upload = gr.File(
                        label=f"txt, md or pdf, up to {documents.MAX_UPLOAD >> 20} MB",
                        visible=False,
                        file_types=list(documents.SUFFIXES),
                        elem_id="upload",
                        height=110,
                    )
                    length = gr.Slider(
                        512,
                        desk.longest(model),
                        value=desk.length(model),
                        step=256,
                        elem_id="length",
                        label="Context, tokens",
                        info="repeats or cuts the document",
                    )
                    facts = gr.HTML(desk.about(model, SOURCES[0], "", None, desk.length(model)), padding=True)
                with gr.Group():
                    hide = gr.Checkbox(True, label="Hide a needle: plant a fact, check the answer", elem_id="hide")
                    depth = gr.Slider(0, 100, value=40, step=5, label="at depth, %", elem_id="depth")
                    question = gr.Textbox(
                        desk.question(model, True, 40, desk.length(model)),
                        label="Question",
                        lines=1,
                        max_lines=3,
                        max_length=4000,
                        elem_id="question",
                    )
                with gr.Group():
                    labels = [(method.label, key) for key, method in METHODS.items()]
                    method = gr.Radio(labels, value=next(iter(METHODS)), label="Cache to race", elem_id="method")
                    sliders, groups = _sliders(on_gpu)
                    offload = gr.Checkbox(False, label="Offload: full blocks in host memory", elem_id="offload")
                with gr.Group():
                    new_tokens = gr.Slider(
                        8, 1024, value=256 if on_gpu else 96, step=8, label="New tokens, at most", elem_id="new-tokens"
                    )
                    go_on = gr.Checkbox(
                        True, label="Decode on after the end of the answer, for the clocks", elem_id="go-on"
                    )
                with gr.Row():
                    start = gr.Button("Race", variant="primary", elem_id="race", min_width=90)
                    stop = gr.Button("Stop", interactive=False, elem_id="stop", min_width=90)
                    clear = gr.Button("Clear", elem_id="clear", min_width=90)
            with gr.Column(scale=5, min_width=320):
                status = gr.HTML(desk.status("Press Race."), elem_id="status")
                with gr.Row():
                    panes = [
                        gr.HTML(desk.empty_pane(i), elem_id=f"pane-{name}", min_width=280)
                        for i, name in enumerate(("dense", "sparse"))
                    ]
                pictures = [gr.HTML(first, elem_id=name) for name, first in desk.empty_pictures().items()]

        inputs = [chosen, source, pasted, upload, length, hide, depth, question, method, offload, new_tokens, go_on]
        outputs = [status, *panes, *pictures, start, stop]
        quietly = {"show_progress": "hidden", "api_visibility": "private"}
        start.click(desk.race, [*inputs, *sliders], outputs, concurrency_limit=8, concurrency_id="race", **quietly)
        start.click(None, js=_SHOW)
        question.submit(desk.race, [*inputs, *sliders], outputs, concurrency_limit=8, concurrency_id="race", **quietly)
        stop.click(desk.stop, None, stop, queue=False, **quietly)
        clear.click(desk.clear, None, [status, *panes], queue=False, **quietly)
        page.unload(desk.leave)

        source.change(
            lambda s: [gr.update(visible=s == name) for name in SOURCES[1:]], source, [pasted, upload], **quietly
        )
        method.change(lambda m: [gr.update(visible=m == key) for key in METHODS], method, groups, **quietly)
        method.change(lambda m: gr.update(interactive=m != DENSE), method, offload, **quietly)
        chosen.change(desk.chose_model, [chosen, hide, depth], [length, question, status], **quietly)
        for control in (hide, depth, length):
            event = control.release if isinstance(control, gr.Slider) else control.change
            event(desk.question, [chosen, hide, depth, length, question], question, **quietly)
        for event in (chosen.change, source.change, pasted.blur, upload.change, length.release):
            event(desk.about, [chosen, source, pasted, upload, length], facts, **quietly)
    page.queue(default_concurrency_limit=8, max_size=64)
    return page


def _sliders(on_gpu: bool) -> tuple[list[gr.Slider], list[gr.Group]]:
    """The controls of all caches, in the order of ``METHODS``; those of the first are visible."""
    sliders, groups = [], []
    for index, (key, method) in enumerate(METHODS.items()):
        with gr.Group(visible=index == 0) as group:
            gr.HTML(f"<div class='small'>{method.about}</div>", padding=True)
            for c in method.controls:
                value = c.on_gpu if on_gpu and c.on_gpu is not None else c.value
                sliders.append(
                    gr.Slider(
                        c.minimum,
                        c.maximum,
                        value=value,
                        step=c.step,
                        label=c.label,
                        info=c.info,
                        elem_id=f"{key}-{c.name}",
                    )
                )
        groups.append(group)
    return sliders, groups


def launch(
    models: Models,
    model: str = PROBE,
    host: str = "127.0.0.1",
    port: int | None = None,
    browser: bool = False,
    share: bool = False,
    block: bool = True,
    more: Sequence[str] = (),
):
    """Serve the page.

    Args:
        model: chosen at first; ``more``: offered, too.
        host: ``127.0.0.1`` is reached from this machine only.
        port: the first free one from 7860 on by default.
        share: a public link through gradio's servers, which sees everything.
        block: come back when the server has ended.

    Returns:
        ``(page, url)``.
    """
    page = build(models, model, more)
    _, url, _ = page.launch(
        server_name=host,
        server_port=port,
        inbrowser=browser,
        share=share,
        prevent_thread_lock=not block,
        max_file_size=documents.MAX_UPLOAD,
        show_error=False,
        quiet=True,
        footer_links=[],
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
        run_history=False,
        theme=theme(),
        css=css(),
    )
    return page, url
