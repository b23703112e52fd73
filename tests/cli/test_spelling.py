"""Errors of Python's arguments are told with the options that a command has for them."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import fields

import pytest
from command_line import error, run

from hf_sparsekv import ServingConfig
from hf_sparsekv.cli import loading, output
from hf_sparsekv_cli.commands import generate, plan
from hf_sparsekv_cli.evaluate import needle
from hf_sparsekv_cli.options import ENGINE, spelling
from hf_sparsekv_cli.serve import serve
from hf_sparsekv_config.serving import MOST_ROWS
from hf_sparsekv_serve.cli import serve as serving


@pytest.mark.parametrize(
    ("command", "message", "told"),
    [
        (serve, "max_length=9999 is over the context of 2048", "--context 9999 is over the context of 2048"),
        (serve, "names no context: give ServingConfig(max_length=...)", "names no context: give --context"),
        (serve, "of max_length=9: give ServingConfig(max_length=4) if", "of --context 9: give --context 4 if"),
        (serve, "max_tokens=8 asks for 3 blocks", "--batch-tokens 8 asks for 3 blocks"),
        (serve, "Give ServingConfig(prefix_cache=False) if", "Give --no-prefix-cache if"),
        (serve, "or raise OffloadConfig(max_host_bytes=...)", "or raise --host-kv"),
        (serve, "slower; see OffloadConfig(device_pool=...)", "slower; see --device-kv"),
        (serve, "exact=True is not for lag=True. Use TokenConfig()", "--exact is not for --lag. Use --cache token"),
        (serve, "prefill_ms must be a number > 0, got nan", "--prefill-ms must be a number > 0, got nan"),
        (serve, "give max_draft=1 or more", "give max_draft=1 or more"),  # no option
        (generate, "label_channels=64 exceeds", "--label-channels 64 exceeds"),
        (generate, "raise OffloadConfig(max_host_bytes=...)", "raise OffloadConfig(max_host_bytes=...)"),  # no option
        (generate, "cache_rank='cuda:1': no such GPU", "--cache-rank cuda:1: no such GPU"),
        (plan, "max_length=5 is less than the context", "--max-length 5 is less than the context"),
        (needle, "token_budget=5 is", "token_budget=5 is"),  # as its --cache names it
        *((serve, text, text) for text in ("/max_length=4/max_rows is", "'max_length' of", "config.max_length is")),
    ],
)
def test_arguments_are_told_as_options(command, message, told):
    assert spelling(command)(message) == told


def test_options_of_the_engine_are_options_of_serve():
    options = inspect.signature(serve).parameters
    assert set(ENGINE.values()) <= options.keys()
    limits = {one.name for one in fields(ServingConfig)} - {"chunk", "layer_segments", "working_set"}
    assert limits <= ENGINE.keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--context", "9999"), "error: --context 9999 is over the model's context of 2048 tokens"),
        (("--context", "1k", "--batch-tokens", 10**12), "error: --batch-tokens 1000000000000 asks for "),
    ],
)
def test_serve_names_its_options(tiny, options, message):
    assert error("serve", tiny, "--port", 0, *options).startswith(message)


def test_more_rows_than_can_be_are_refused_at_once(monkeypatch):
    monkeypatch.setattr(loading, "load", lambda *args: pytest.fail("a model was loaded"))
    said = run("serve", "x", "--max-rows", MOST_ROWS + 1, status=2).stderr
    assert "--max-rows" in said and str(MOST_ROWS) in said
    with pytest.raises(ValueError, match=rf"max_rows must be an integer in \[1, {MOST_ROWS}\], got {MOST_ROWS + 1}"):
        ServingConfig(max_rows=MOST_ROWS + 1)
    ServingConfig(max_rows=MOST_ROWS)


def test_an_ipv6_address_may_have_brackets(monkeypatch):
    """As in a URL; without IPv6, which a machine may lack."""
    asked, before = [], serving.socket.getaddrinfo

    def named(host, *args, **kwargs):
        asked.append(host)
        return before("127.0.0.1", *args, **kwargs)

    monkeypatch.setattr(serving.socket, "getaddrinfo", named)
    for host in ("[::1]", "::1"):
        serving._listen(host, 0).close()
    assert asked == ["::1", "::1"]


def test_warnings_are_told_as_options(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        command = output.one_line_errors(
            lambda: warnings.warn("see OffloadConfig(device_pool=...)", stacklevel=1), spelling(serve)
        )
        command()
    assert capsys.readouterr().err == "warning: see --device-kv\n"
