"""Contents of the demo's page, and its commands."""

from __future__ import annotations

import csv
import re
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("gradio", reason="the demo needs gradio: pip install -e '.[demo]'")


from demos import a_task, probe_model, run

from demo import charts, record, recording
from demo.desk import Desk
from demo.race import Session
from demo.turns import Turns
from demo.view import RaceView

# ---------------------------------------------------------------------- what it looks like


def a_view(dense: float, sparse: float, stats=None, count: int = 20) -> RaceView:
    view = RaceView()
    for lane, ms in zip(view.lanes, (dense, sparse)):
        lane.name, lane.ids, lane.seconds = "name, about", list(range(count)), [1.0, *[ms / 1e3] * (count - 1)]
    view.lanes[1].totals = stats
    return view


def test_verdicts():
    probe = probe_model()
    ran, _ = run(Session(Turns()), probe, a_task(probe))
    stats = ran.lanes[1].stats
    share = f"{100 * stats.attended_share:.0f} %"

    def said(dense, sparse, stats=stats, on_gpu=False, answers=("", ""), wanted=None, count=20, host=None):
        view = a_view(dense, sparse, stats, count)
        view.on_gpu, view.wanted = on_gpu, wanted
        if host is not None:
            view.lanes[0].memory, view.lanes[1].memory = {"device": 5000, "host": 0}, {"device": 3000, "host": host}
        for lane, answer in zip(view.lanes, answers):
            lane.answer, lane.after = answer, "x"
        return view.verdict()

    headline, below = said(20, 10, answers=("7", "7"))
    assert headline == f"Reads {share} of the context, same answer"
    assert "10 ms a token, full attention 20 ms (2.0x faster)" in below
    headline, below = said(10, 20, answers=("7", "8"))
    assert headline.endswith("another answer"), "what is not so is not said"
    assert "(2.0x slower here)" in below, "a slower one is told, too"
    assert said(10, 20, answers=("7, a", "7, b"), wanted="7")[0].endswith("both find the hidden fact")
    # Of full attention that finds nothing the cache is not accused, whatever it finds itself.
    for theirs, wanted, headline in (
        (("8", "8"), "7", ", same answer"),
        (("8", "9"), "7", ", the model itself misses the hidden fact"),
        (("8", "7"), "7", ", the model itself misses the hidden fact"),
        (("7", "8"), "7", ", another answer"),
        (("7", "7"), "7", ", same answer: both find the hidden fact"),
    ):
        told = said(10, 20, answers=theirs, wanted=wanted)
        assert told[0].endswith(headline)
        assert ("that is the model's limit, not the cache's" in told[1]) == (theirs[0] == "8")
    assert said(10, 20)[0] == f"Reads {share} of the context", "of answers that are not there, nothing"
    headline, below = said(20, 10, on_gpu=True, answers=("7", "7"))
    assert headline == f"2.0x faster, reads {share} of the context, same answer"
    assert below.startswith("10.0 ms a token, full attention 20.0 ms: ")
    assert said(10, 10.1, on_gpu=True)[0].startswith("As fast, reads")
    assert "fixed time" in said(10, 20, on_gpu=True)[1] or "little to save" in said(10, 20, on_gpu=True)[1]
    headline, below = said(10, 20, on_gpu=True, host=9)
    assert headline == f"Frees 2 kB of the GPU, reads {share} of the context"
    assert "(2.0x slower here)" in below and "in host memory" in below
    assert said(20, 10, on_gpu=True, host=9)[0].startswith("2.0x faster")
    assert said(10, 20, on_gpu=True, host=0)[0].startswith("2.0x slower here")
    assert said(10, 20, count=4) is None, "too few to say"
    assert "noise" in said(10, 10.1, stats=None)[1]


def test_the_page_begins_with_how_a_recorded_race_ended():
    """The largest gain comes first, then one with text; without recordings there is nothing but the button."""
    here = torch.device("cpu")
    recordings = recording.found()
    desk = Desk(SimpleNamespace(device=here, look=lambda name: (None, 8192)), recordings)
    verdict, *_ = desk.first()
    assert "Recorded" in verdict and f"{recordings[0].gain:.1f}x faster" in verdict
    recordings = recordings[1:]
    desk = Desk(SimpleNamespace(device=here, look=lambda name: (None, 8192)), recordings)
    verdict, dense, sparse, *pictures = desk.first()
    assert "Recorded" in verdict and "the context" in verdict and all(pictures)
    assert all("the hidden fact: found" in pane for pane in (dense, sparse))
    # An answer that has ended is seen from its beginning.
    shown = f"<mark>{recordings[0].wanted}</mark>", "class='talk whole'"
    assert all(pane.count(part) == 1 for pane in (dense, sparse) for part in shown)
    assert "half a minute" in desk.press("small") and "recorded" in desk.press("small")
    bare = Desk(SimpleNamespace(device=here, look=lambda name: (None, 8192)))
    assert bare.first()[:3] == ["", "", ""] and "recorded" not in bare.press("small")
    headlines = [each.headline for each in desk.recordings]
    assert all(re.search(r"reads? [\d.]+ %", headline, re.I) for headline in headlines), headlines


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("longest", [512, 2048, 8192, 40960, 131072])
def test_the_first_length_leaves_room_for_an_answer(device, longest):
    """The slider's largest value is what the model was made for, which has no room for question and answer."""
    desk = Desk(SimpleNamespace(device=torch.device(device), look=lambda name: (None, longest)))
    length = desk.length("any")
    assert length == min(longest, 512) or length + 1024 <= longest
    assert length == min({"cpu": 2048, "cuda": 32768}[device], max(512, longest - 1024))


def test_model_output_is_text_and_not_html():
    view = a_view(10, 20)
    view.lanes[1].name = "<script>alert(1)</script>, about"
    for picture in (charts.line_plot(view), charts.numbers(view, {"<b>": "<i>"})):
        assert "<script>" not in picture
        assert "<i>" not in picture


# ---------------------------------------------------------------------- commands


@pytest.mark.slow
def test_the_race_as_a_command(tmp_path, capsys):
    points, picture = tmp_path / "race.csv", tmp_path / "race.svg"
    command = ["--model", "probe", "--length", "1k", "--new-tokens", "10", "--csv", str(points), "--plot", str(picture)]
    assert record.main([*command, "--set", "mass=0.6"]) == 0
    rows = list(csv.DictReader(points.open()))
    assert [sum(row["lane"] == lane for row in rows) for lane in ("dense", "sparse")] == [10, 10]
    assert all(float(row["ms"]) > 0 and row["context"] == "1024" for row in rows)
    assert any(row["kv_bytes_read"] for row in rows if row["lane"] == "sparse")
    assert "<svg" in picture.read_text()
    assert capsys.readouterr().out.count("hidden fact found") == 2
    picture.unlink()
    assert record.main(["--csv", str(points), "--plot", str(picture), "--only-plot"]) == 0
    assert picture.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "random:nothing"], "no shape 'nothing'"),
        (["--set", "colour=3"], "two_level has the controls"),
        (["--model", "/no/such/place"], "no model"),
    ],
)
def test_the_race_with_wrong_arguments(arguments, message, capsys):
    assert record.main(["--length", "1k", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_the_page_binds_to_this_machine_and_shares_nothing():
    from demo.__main__ import Options, arguments

    options = Options(**vars(arguments().parse_args([])))
    assert options.host == "127.0.0.1"
    assert not options.share


def test_serving_an_unknown_model(capsys):
    from demo.__main__ import Options, serve

    assert serve(Options(models=["probe", "/no/such/place"])) == 1
    assert "there is no model" in capsys.readouterr().err


@pytest.mark.parametrize("fetched", [True, False])
def test_the_small_model_comes_first_if_it_is_here(fetched, monkeypatch, capsys, tmp_path):
    from demo import app, models
    from demo.__main__ import Options, serve

    launched = []

    def launch(models, model, *args, **kwargs):
        launched.append(model)
        raise OSError("no port is free")

    monkeypatch.setattr(app, "launch", launch)
    if fetched:
        monkeypatch.setattr(models, "locate", lambda name: str(models.PROBE_PATH))
    else:
        monkeypatch.setattr(models, "small_model_path", lambda: tmp_path)
    assert serve(Options()) == 1
    told = capsys.readouterr()
    assert "no port is free" in told.err
    assert launched == ["small" if fetched else "probe"]
    assert ("hf-sparsekv fetch" in told.out) is not fetched


def test_the_command_away_from_a_checkout(monkeypatch, tmp_path):
    from typer.testing import CliRunner

    from hf_sparsekv.cli import demo as command
    from hf_sparsekv_cli.app import app

    monkeypatch.setattr(command, "ROOT", tmp_path)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert "from a checkout" in result.output
