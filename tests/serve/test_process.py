"""The end of a process that does nothing but serve."""

from __future__ import annotations

import pytest

from hf_sparsekv_serve import process


@pytest.mark.parametrize(("error", "code"), [(None, 0), (RuntimeError("lost"), 1), (SystemExit(), 1)])
def test_its_exit_code_says_whether_it_has_failed(error, code, monkeypatch, capsys):
    """A supervisor starts a process again that ends with another code than 0."""

    def work():
        if error is not None:
            raise error

    class Ended(BaseException):
        pass

    def leave(code):
        raise Ended(code)

    monkeypatch.setattr(process, "leave", leave)
    with pytest.raises(Ended) as ended:
        process.end_after(work)
    assert ended.value.args == (code,) and ("lost" in capsys.readouterr().err) == (str(error) == "lost")
