"""Keys and options of an earlier release are refused in one line that names the replacement."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.errors import HydraException

from dlrm_sharded.commands import removed
from dlrm_sharded.commands.messages import readable_message
from dlrm_sharded.commands.removed import REMOVED
from dlrm_sharded.commands.sharders import make_sharder
from dlrm_sharded.commands.yamls import CONF_DIR
from dlrm_sharded.files.errors import ConfigError
from tests.unit.commands.conftest import composed_config

CONFIGS = sorted(path.stem for path in Path(CONF_DIR).glob("*.yaml"))


def refusals(override: str) -> Iterator[str]:
    """Messages of the commands that an override is not for, one after another."""
    for config in CONFIGS:
        try:
            composed_config(config, override)
        except (HydraException, ValueError) as error:  # Hydra raises both
            yield readable_message(error) or ""


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_each_row_is_refused_by_the_commands(name: str) -> None:
    given = f"{name}key" if name.endswith(".") else name
    said = refusals(given if "=" in given else f"{given}=unused")
    expected = f"{given} was removed in 0.3: {REMOVED[name]}"
    assert expected in said
    assert "\n" not in expected


def test_keys_below_a_removed_one_are_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(removed.REMOVED, "trainer.gone", "use trainer.kept")
    for key in ("trainer.gone", "trainer.gone.deep"):
        assert f"{key} was removed in 0.3: use trainer.kept" in refusals(f"{key}=1")
    assert not any("removed in 0.3" in message for message in refusals("trainer.gone_not=1"))


@pytest.mark.parametrize("key", ["time_budget_s", "warm_start", "pin", "patience"])
def test_keys_of_our_search_name_it_where_the_published_one_is_chosen(key: str) -> None:
    with pytest.raises(HydraException) as error:
        composed_config("plan", "sharder=neuroshard", f"sharder.{key}=1")
    message = f"sharder.{key} is a key of sharder=search; use sharder=search"
    assert (readable_message(error.value) or "").startswith(message)
    in_compare = f"{message}, or in dlrm-compare 'sharders=[search;{key}=...]'"
    assert in_compare in refusals(f"sharder.{key}=1")  # of dlrm-compare
    with pytest.raises(ConfigError, match=message):
        make_sharder("neuroshard", **{key: 1})


def test_a_key_below_one_of_our_search_is_refused_with_the_way_to_write_it() -> None:
    with pytest.raises(HydraException) as error:
        composed_config("plan", "sharder.pin.user=[0]")
    assert (readable_message(error.value) or "").endswith("write 'sharder.pin={user: ...}'")


def test_a_sharder_by_name_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(removed.REMOVED, "sharder=gone", "use sharder=dim")
    monkeypatch.setitem(removed.REMOVED, "sharder.lost", "leave it out")
    with pytest.raises(ConfigError, match=r"^sharder=gone was removed in 0\.3: use"):
        make_sharder("gone")
    with pytest.raises(ConfigError, match=r"^sharder\.lost was removed in 0\.3: leave"):
        make_sharder("dim", lost=1)
