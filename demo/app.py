"""The page: controls on the left, race and chat on the right; on a phone the controls come last."""

from __future__ import annotations

import os

# Before gradio is imported: nothing may leave the machine unasked.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from collections.abc import Sequence
from importlib import resources

import gradio as gr

from . import documents, recording
from .caches import DENSE, METHODS
from .desk import DEPTH, Desk
from .models import PROBE, SMALL, Models
from .panes import status as status_line
from .recording import Recording

NO_FONTS = ["ui-sans-serif", "system-ui", "sans-serif"]  # of the system: others would be fetched
MONO = ["ui-monospace", "monospace"]
LABELS = {SMALL: "small (SmolLM2-135M)", PROBE: "probe (6M, own language)"}  # of the models that are always offered
SOURCES = ["Bundled", "Paste", "Upload"]
INTRO = "One long document, the same question: full attention, and a cache that reads only what it chooses."
SETTINGS = "<a class='small jump' href='#settings'>Model, document and cache: below</a>"  # on a phone
CHAT = "The document is read once, with the first question; later questions start from what was read."


def theme() -> gr.themes.Base:
    """Quiet, and without fonts from elsewhere."""
    return gr.themes.Base(
        primary_hue="teal", neutral_hue="gray", text_size="sm", radius_size="sm", font=NO_FONTS, font_mono=MONO
    ).set(
        body_background_fill="#f8f9fa",
        body_background_fill_dark="#0f1720",
        body_text_color_subdued="#5b6472",
        body_text_color_subdued_dark="#a3acba",
        block_info_text_color="#5b6472",
        block_info_text_color_dark="#a3acba",
        block_border_width="1px",
        block_shadow="none",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_hover_dark="*primary_800",
    )


def css() -> str:
    return resources.files("demo").joinpath("page.css").read_text(encoding="utf-8")


def build(
    models: Models, model: str = SMALL, more: Sequence[str] = (), recordings: Sequence[Recording] | None = None
) -> gr.Blocks:
    """The page.

    Args:
        model: chosen at first.
        more: names of models that are offered beside it and those of ``LABELS``.
        recordings: races to play; ``None``: those of ``demo/recorded``.
    """
    desk = Desk(models, recording.found() if recordings is None else recordings)
    listed = models.listed is not None
    offered = [(LABELS.get(name, name), name) for name in dict.fromkeys([*LABELS, model, *more])]
    on_gpu = models.device.type == "cuda"
    with gr.Blocks(title="hf-sparsekv: time per token", analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        gr.HTML(f"<h1>Sparse KV cache against full attention</h1><p class='intro'>{INTRO} {SETTINGS}</p>")
        with gr.Row(equal_height=False, elem_id="columns"):
            with gr.Column(scale=2, min_width=300, elem_id="settings"):
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
                    depth = gr.Slider(0, 100, value=DEPTH, step=5, label="at depth, %", elem_id="depth")
                    question = gr.Textbox(
                        desk.question(model, True, DEPTH, desk.length(model)),
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
            with gr.Column(scale=5, min_width=320, elem_id="results"), gr.Tabs():
                with gr.Tab("Race", elem_id="race-tab"):
                    with gr.Row(elem_id="buttons"):
                        start = gr.Button("Run it here", variant="primary", elem_id="race", min_width=120, scale=2)
                        stop = gr.Button("Stop", interactive=False, elem_id="stop", min_width=80)
                        clear = gr.Button("Clear", elem_id="clear", min_width=80)
                    plays = _recorded(desk.recordings)
                    status = gr.HTML(status_line(desk.press(model)), elem_id="status")
                    first = iter(desk.first())
                    verdict = gr.HTML(next(first), elem_id="verdict")
                    with gr.Row(elem_id="panes"):
                        panes = [
                            gr.HTML(next(first), elem_id=f"pane-{name}", min_width=280) for name in ("dense", "sparse")
                        ]
                    pictures = [gr.HTML(next(first), elem_id=name) for name in ("plot", "numbers", "heat")]
                with gr.Tab("Chat", elem_id="chat-tab"):
                    heard = gr.HTML(status_line(CHAT), elem_id="heard")
                    talk = gr.Chatbot(
                        show_label=False, height=240, elem_id="talk", render_markdown=False, buttons=[],
                        placeholder="Ask something about the document.", feedback_options=None,
                    )  # fmt: skip
                    with gr.Row():
                        words = gr.Textbox(
                            desk.question(model, True, DEPTH, desk.length(model)), show_label=False, lines=1,
                            max_lines=3, max_length=4000, elem_id="words", scale=5, min_width=200,
                            placeholder="A question",
                        )  # fmt: skip
                        ask = gr.Button("Ask", variant="primary", elem_id="ask", min_width=80)
                        hush = gr.Button("Stop", interactive=False, elem_id="hush", min_width=80)
                        anew = gr.Button("Clear", elem_id="anew", min_width=80)
                    asked = gr.HTML("", elem_id="asked")

        document = [chosen, source, pasted, upload, length, hide, depth]
        inputs = [*document, question, method, offload, new_tokens, go_on]
        outputs = [status, verdict, *panes, *pictures, start, stop, *plays]
        said = [heard, talk, asked, ask, hush]
        quietly = {"show_progress": "hidden", "api_visibility": "private"}
        races = {"concurrency_limit": 8, "concurrency_id": "race", **quietly}
        for event in (start.click, question.submit):
            event(desk.race, [*inputs, *sliders], outputs, **races)
        for play, each in zip(plays, desk.recordings):
            play.click(desk.player(each), None, outputs, **races)
        for event in (ask.click, words.submit):
            event(desk.ask, [*document, words, method, offload, new_tokens, *sliders], said, **races)
        for button in (stop, hush):
            button.click(desk.stop, None, button, queue=False, **quietly)
        clear.click(desk.clear, None, [status, verdict, *panes], queue=False, **quietly)
        anew.click(desk.new_chat, None, said, queue=False, **quietly)
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
        question.change(lambda text: text, question, words, **quietly)
        for event in (chosen.change, source.change, pasted.blur, upload.change, length.release):
            event(desk.about, [chosen, source, pasted, upload, length], facts, **quietly)
    page.queue(default_concurrency_limit=8, max_size=64)
    return page


def _recorded(recordings: Sequence[Recording]) -> list[gr.Button]:
    """A button for each recording; nothing at all where there are none."""
    if not recordings:
        return []
    with gr.Row(elem_id="recorded"):
        return [
            gr.Button(f"\u25b6 {each.headline}\n{each.title}, recorded", elem_id=f"play-{number}", min_width=200)
            for number, each in enumerate(recordings)
        ]


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
    model: str = SMALL,
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
