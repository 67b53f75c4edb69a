"""Commands without a config take key=value words, and refuse what they cannot heed."""

import pytest

from dlrm_sharded.commands import check_install
from dlrm_sharded.commands.words import read_words
from dlrm_sharded.files.errors import ConfigError


def read(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[list[str], dict[str, object]]:
    monkeypatch.setattr("sys.argv", ["dlrm-command", *words])
    return read_words("usage", ("out", "num", "share", "parts", "glob"), names="runs")


def test_words_and_keys(monkeypatch):
    words = ("runs/a=1", "out=x=y", "num=4", "share=null", "parts=[a,b]", "glob=*.gz")
    expected = {"out": "x=y", "num": 4, "parts": ["a", "b"], "glob": "*.gz"}
    assert read(monkeypatch, *words) == (["runs/a=1"], expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs", "--out", "x"], "--out has no effect here; keys: out=, num="),
        (["runs", "oot=x"], "oot=x has no effect here; keys: out=, num="),
        (["num=1"], "name runs"),
    ],
)
def test_what_is_refused(monkeypatch, words, message):
    with pytest.raises(ConfigError) as raised:
        read(monkeypatch, *words)
    assert str(raised.value).startswith(message)


def test_help(monkeypatch, capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        read(monkeypatch, "--help")
    assert capsys.readouterr().out == "usage\n"


def test_a_check_takes_no_words(run_command):
    done = run_command(check_install.main, "fast")
    assert done.returncode == 2
    assert "fast has no effect here; keys: none" in done.stderr
