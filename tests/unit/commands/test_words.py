"""Commands without a config take key=value words, and refuse what they cannot heed."""

import pytest

from dlrm_sharded.commands import check_install
from dlrm_sharded.commands.words import Keys, read_words, split_list
from dlrm_sharded.files.errors import ConfigError

KEYS: Keys = {"out": (str, None), "num": (int, 3), "share": (float, 0.5), "parts": (split_list, [])}


def read(monkeypatch: pytest.MonkeyPatch, *words: str, **options: object) -> dict[str, object]:
    monkeypatch.setattr("sys.argv", ["dlrm-command", *words])
    return vars(read_words("usage", KEYS, names="runs", **options))  # type: ignore[arg-type]


def test_words_and_keys(monkeypatch):
    found = read(monkeypatch, "runs/a=1", "out=x=y", "num=4", "share=null", "parts=[a,b]")
    expected = {"names": ["runs/a=1"], "out": "x=y", "num": 4, "share": 0.5, "parts": ["a", "b"]}
    assert found == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs", "--out", "x"], "--out is no flag; write out=VALUE"),
        (["runs", "--max-ind-range=9"], "--max-ind-range is no flag; write max_ind_range=9"),
        (["runs", "oot=x"], "oot=x: there is no key 'oot'; known: out, num, share, parts"),
        (["runs", "num=1", "num=2"], "num is there twice"),
        (["runs", "num=x"], "num is 'x', must be an integer"),
        (["runs", "share=x"], "share is 'x', must be a number"),
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
    assert "'fast' has no effect here; known: none" in done.stderr
